"""Index codes: how the places of a sparse stream's values are written in a message."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparcel import kernels
from sparcel.errors import FormatError


class IndexCode(Protocol):
    """Writes sorted, unique indices; the counts alone decide how many bytes they take."""

    def nbytes(self, count: int, size: int) -> int:
        """Return the bytes of ``count`` indices below ``size``; never fewer for a larger count."""

    def encode(self, indices: Tensor, size: int) -> Tensor:
        """Return a contiguous tensor of `nbytes` bytes, of any dtype.

        ``indices`` are ``[nnz]``, int32 or int64 as `kernels.index_dtype` has them.
        """

    def decode(self, content: Tensor, count: int, size: int) -> Tensor:
        """Return the ``count`` indices below ``size`` in ``content`` (uint8, aligned to 8 bytes).

        Raises
        ------
        FormatError
            When the indices are not sorted, unique and in range. Nothing is read out of bounds.
        """


class RawIndices:
    """Indices as they are in memory, 4 or 8 bytes each; decoding copies nothing."""

    def nbytes(self, count: int, size: int) -> int:
        """See `IndexCode.nbytes`."""
        return count * kernels.index_dtype(size).itemsize

    def encode(self, indices: Tensor, size: int) -> Tensor:
        """See `IndexCode.encode`."""
        return indices.contiguous()

    def decode(self, content: Tensor, count: int, size: int) -> Tensor:
        """See `IndexCode.decode`."""
        return checked(content.view(kernels.index_dtype(size)), count, size)


class PackedIndices:
    """Indices as `kernels.pack_indices` packs them: by Elias and Fano's code, or as a bitmap.

    Of n coordinates, k indices take about log₂(n/k) + 2 bits each, and never more than n bits
    together.
    """

    def nbytes(self, count: int, size: int) -> int:
        """See `IndexCode.nbytes`."""
        return 8 * kernels.packed_words(min(count, size), size)

    def encode(self, indices: Tensor, size: int) -> Tensor:
        """See `IndexCode.encode`."""
        return kernels.pack_indices(indices.contiguous(), size)

    def decode(self, content: Tensor, count: int, size: int) -> Tensor:
        """See `IndexCode.decode`."""
        indices = kernels.unpack_indices(content.view(torch.int64), count, size)
        return checked(indices, count, size)


INDEX_CODES: dict[str, IndexCode] = {"raw": RawIndices(), "packed": PackedIndices()}
"""The index codes by name. A code's place in this table is its number in a message's header."""


def checked(indices: Tensor | None, count: int, size: int) -> Tensor:
    """Return the indices that a message holds, sorted, unique and in range, or raise `FormatError`.

    None stands for packed indices that cannot be unpacked.
    """
    if indices is None:
        raise FormatError(f"corrupt message: it does not hold {count} packed indices")
    position = kernels.check_indices(indices, size)
    if position >= 0:
        raise FormatError(
            f"corrupt message: index {int(indices[position])} at position {position} is out of"
            f" order or outside [0, {size})"
        )
    return indices
