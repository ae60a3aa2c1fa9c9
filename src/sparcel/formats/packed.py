"""Values as they are, and indices in few bits each: nothing is lost, and lengths are known."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparcel import kernels
from sparcel.errors import FormatError
from sparcel.formats.base import Encoded
from sparcel.formats.coo import COO, checked
from sparcel.formats.header import HEADER_BYTES, Header, padded
from sparcel.formats.parts import join, split
from sparcel.ops import Op
from sparcel.stream import SparseStream


@dataclass(frozen=True)
class Packed:
    """Writes values as `COO` does, then the indices as `kernels.pack_indices` packs them.

    Of n coordinates, k indices take log₂(n/k) + 2 bits each, where `COO` has 32 or 64. The counts
    alone decide the length of a message, whichever coordinates it holds. Dense streams use `COO`.
    """

    @property
    def kind(self) -> int:
        """See `Format.kind`."""
        return 2

    def encode(self, stream: SparseStream, start: int = 0) -> Encoded:
        """See `Format.encode`; encoding is exact, and ``start`` does not matter."""
        if stream.indices is None:
            return COO.encode(stream)
        length = self.max_bytes(stream.nnz, stream.size, stream.value_bytes)
        header = Header.of(stream, self.kind, length)
        words = kernels.pack_indices(stream.indices.contiguous(), stream.size)
        return Encoded(join(header, [stream.values.contiguous(), words]))

    def decode(self, message: Tensor, header: Header) -> SparseStream:
        """See `Format.decode`; the values are a view of the message."""
        if header.dense:
            raise FormatError("impossible packed header: dense=True")
        header.check("packed", self.max_bytes(header.nnz, header.size, header.value_bytes))
        values, packed = split(message, header)
        indices = kernels.unpack_indices(packed.view(torch.int64), header.nnz, header.size)
        return SparseStream.unchecked(checked(indices, header), values, header.size, header.finite)

    def expected_bytes(self, nnz: float | None, size: float, value_bytes: int) -> float:
        """See `Format.expected_bytes`; messages with the same counts have the same length."""
        return self.max_bytes(None if nnz is None else round(nnz), round(size), value_bytes)

    def max_bytes(self, nnz: int | None, size: int, value_bytes: int) -> int:
        """See `Format.max_bytes`; it never falls when ``nnz`` rises."""
        if nnz is None:
            return COO.max_bytes(None, size, value_bytes)
        words = kernels.packed_words(min(nnz, size), size)
        return HEADER_BYTES + padded(nnz * value_bytes) + 8 * words

    def dense_from(self, size: int, value_bytes: int) -> int:
        """See `Format.dense_from`: the smallest count of entries whose sparse message is longer.

        In large streams these are 94 % of the coordinates with values of four bytes, and 88 % with
        two. In memory the dense form is smaller from half or a third of the coordinates on.
        """
        return _dense_from(size, value_bytes)

    def reduce_messages(
        self, messages: Sequence[Tensor], like: SparseStream, op: Op
    ) -> SparseStream | None:
        """See `Format.reduce_messages`; indices have to be unpacked to be merged."""
        return None


@lru_cache(maxsize=4096)
def _dense_from(size: int, value_bytes: int) -> int:
    """Return `Packed.dense_from`; with all entries, the sparse message is longer."""
    packed = Packed()
    dense = packed.max_bytes(None, size, value_bytes)
    shorter = bisect_right(
        range(size), dense, key=lambda nnz: packed.max_bytes(nnz, size, value_bytes)
    )
    return max(shorter, 1)
