"""Two formats that sparcel does not contain, to test that nothing depends on a format's layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparcel import SparseStream
from sparcel.formats import COO, HEADER_BYTES, Encoded, Header
from sparcel.kernels import index_dtype
from sparcel.ops import Op


def padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


class Deltas:
    """Writes values, then the distances between indices in 16 bits each.

    It takes streams of up to 65,535 coordinates. An entry takes two bytes less than in `COO`, so
    streams turn dense at a higher count.
    """

    kind = 200

    def encode(self, stream: SparseStream, start: int = 0) -> Encoded:
        if stream.indices is None:
            return COO.encode(stream)
        assert stream.size < 1 << 16
        content = torch.cat([self._values(stream), self._indices(stream.indices)])
        header = Header.of(stream, self.kind, HEADER_BYTES + content.numel())
        message = torch.empty(header.length, dtype=torch.uint8)
        header.pack_into(message)
        message[HEADER_BYTES:] = content
        return Encoded(message)

    def decode(self, message: Tensor, header: Header) -> SparseStream:
        stop = HEADER_BYTES + header.nnz * header.value_bytes
        values = message[HEADER_BYTES:stop].clone().view(header.dtype)
        if header.width is not None:
            values = values.view(header.nnz, header.width)
        packed = message[HEADER_BYTES + padded(stop - HEADER_BYTES) :]
        indices = self._read(packed, header.nnz).to(index_dtype(header.size))
        return SparseStream.unchecked(indices, values, header.size, header.finite)

    def expected_bytes(self, nnz: float | None, size: float, value_bytes: int) -> float:
        return self.max_bytes(None if nnz is None else round(nnz), round(size), value_bytes)

    def max_bytes(self, nnz: int | None, size: int, value_bytes: int) -> int:
        if nnz is None:
            return COO.max_bytes(None, size, value_bytes)
        return HEADER_BYTES + padded(nnz * value_bytes) + padded(2 * nnz)

    def dense_from(self, size: int, value_bytes: int) -> int:
        return size * value_bytes // (2 + value_bytes) + 1

    def reduce_messages(
        self, messages: Sequence[Tensor], like: SparseStream, op: Op
    ) -> SparseStream | None:
        return None

    def _values(self, stream: SparseStream) -> Tensor:
        return _with_padding(stream.values.contiguous().view(-1).view(torch.uint8))

    def _indices(self, indices: Tensor) -> Tensor:
        deltas = indices.long().diff(prepend=torch.tensor([0]))
        return _with_padding((deltas - (deltas >> 15 << 16)).to(torch.int16).view(torch.uint8))

    def _read(self, packed: Tensor, nnz: int) -> Tensor:
        deltas = packed[: 2 * nnz].clone().view(torch.int16).long() % (1 << 16)
        return deltas.cumsum(0)


class Bytes(Deltas):
    """Writes each distance between indices in as few bytes as possible, so the length varies.

    A distance below 128 takes one byte, others take two or three: 7 bits a byte, the lowest first.
    """

    kind = 201

    def expected_bytes(self, nnz: float | None, size: float, value_bytes: int) -> float:
        """Assume independent indices: a distance is at least d with probability (1 − k/n)^d."""
        if nnz is None or nnz == 0:
            return self.max_bytes(None if nnz is None else 0, round(size), value_bytes)
        absent = 1 - min(nnz / size, 1)
        longer = sum(absent**limit for limit in (1 << 7, 1 << 14))
        return HEADER_BYTES + padded(round(nnz) * value_bytes) + nnz * (1 + longer) + 3.5

    def max_bytes(self, nnz: int | None, size: int, value_bytes: int) -> int:
        if nnz is None:
            return COO.max_bytes(None, size, value_bytes)
        widest = 1 + (size > 1 << 7) + (size > 1 << 14)
        return HEADER_BYTES + padded(nnz * value_bytes) + padded(widest * nnz)

    def _indices(self, indices: Tensor) -> Tensor:
        content = bytearray()
        for delta in indices.long().diff(prepend=torch.tensor([0])).tolist():
            while delta >= 1 << 7:
                content.append(delta % (1 << 7) | 1 << 7)
                delta >>= 7
            content.append(delta)
        return _with_padding(torch.tensor(list(content), dtype=torch.uint8))

    def _read(self, packed: Tensor, nnz: int) -> Tensor:
        deltas, delta, shift = [], 0, 0
        for byte in packed.tolist():
            delta |= (byte & 0x7F) << shift
            shift += 7
            if byte < 1 << 7:
                deltas.append(delta)
                delta = shift = 0
        return torch.tensor(deltas[:nnz], dtype=torch.int64).cumsum(0)


def _with_padding(content: Tensor) -> Tensor:
    return torch.cat([content, content.new_zeros(-content.numel() % 8)])
