"""Index codes: how the places of a sparse stream's values are written in a message."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from sparcel.core import device, kernels
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
        return checked(content.view(kernels.index_dtype(size)), size)


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
        indices, fault = kernels.unpack_indices(content.view(torch.int64), count, size)
        complaint = (
            f"corrupt message: it does not hold {count} packed indices, sorted, below {size}"
        )
        device.later(fault, partial(FormatError, complaint))
        return indices


class ChunkedIndices(RawIndices):
    """Indices in 12 bits each, within chunks of 4096 coordinates, after the count of each chunk.

    All have the same width, so each can be read without the others. `PackedIndices` take fewer
    bits. Below one entry in about 5000 coordinates, where the counts take more than the places
    save, indices are raw.

    Source: the chunks are SparseLoCo's, which takes equally many coordinates of each and needs no
    counts.
    """

    @override
    def nbytes(self, count: int, size: int) -> int:
        return min(super().nbytes(count, size), _chunked_bytes(count, size))

    @override
    def encode(self, indices: Tensor, size: int) -> Tensor:
        if not self._counts_pay(indices.numel(), size):
            return super().encode(indices, size)
        counts = torch.searchsorted(indices, _chunk_starts(size, indices)).diff()
        places = torch.nn.functional.pad(indices & _MOST_PLACE, (0, indices.numel() % 2))
        pairs = (places[::2] | places[1::2] << _PLACE_BITS).to(torch.int32)
        three_bytes = pairs.view(torch.uint8).view(-1, 4)[:, :3]
        return torch.cat((counts.to(torch.int16).view(torch.uint8), three_bytes.flatten()))

    @override
    def decode(self, content: Tensor, count: int, size: int) -> Tensor:
        if not self._counts_pay(count, size):
            return super().decode(content, count, size)
        counts = content[: 2 * _chunks(size)].view(torch.int16).long() & 0xFFFF
        ends = counts.cumsum(0)
        device.later(
            ends[-1] != count,
            lambda: FormatError(f"corrupt message: its chunks do not hold {count} indices"),
        )
        # However wrong the counts are, they now add up to what there is memory for.
        ends.clamp_(max=count)
        ends[-1].fill_(count)
        counts = ends.diff(prepend=ends.new_zeros(1))
        three_bytes = content[2 * _chunks(size) :].view(-1, 3)
        pairs = torch.nn.functional.pad(three_bytes, (0, 1)).view(torch.int32)
        places = torch.cat((pairs & _MOST_PLACE, pairs >> _PLACE_BITS), dim=1).flatten()[:count]
        chunk = torch.arange(_chunks(size), dtype=kernels.index_dtype(size), device=content.device)
        indices = (chunk << _PLACE_BITS).repeat_interleave(counts, output_size=count) | places
        return checked(indices, size)

    def _counts_pay(self, count: int, size: int) -> bool:
        return _chunked_bytes(count, size) < super().nbytes(count, size)


_PLACE_BITS = 12
_MOST_PLACE = (1 << _PLACE_BITS) - 1


def _chunks(size: int) -> int:
    return -(-size >> _PLACE_BITS)


def _chunk_starts(size: int, indices: Tensor) -> Tensor:
    """Return where the chunks start and the last one ends, in the dtype of ``indices``."""
    ends = torch.arange(_chunks(size) + 1, device=indices.device) << _PLACE_BITS
    return ends.clamp(max=size).to(indices.dtype)


def _chunked_bytes(count: int, size: int) -> int:
    """Return the bytes of a 16-bit count for each chunk, and of 12-bit places, two in 3 bytes."""
    return 2 * _chunks(size) + 3 * -(-count // 2)


INDEX_CODES: dict[str, IndexCode] = {
    "raw": RawIndices(),
    "packed": PackedIndices(),
    "chunked": ChunkedIndices(),
}
"""The index codes by name. A code's place in this table is its number in a message's header."""


def checked(indices: Tensor, size: int) -> Tensor:
    """Return the indices that a message holds, sorted, unique and in range, or raise `FormatError`.

    Those on a GPU are checked there, and the next `device.read` raises.
    """
    device.later(kernels.indices_fault(indices, size), partial(_complaint, indices, size))
    return indices


def _complaint(indices: Tensor, size: int) -> FormatError:
    position = kernels.check_indices(indices, size)
    return FormatError(
        f"corrupt message: index {int(indices[position])} at position {position} is out of order"
        f" or outside [0, {size})"
    )
