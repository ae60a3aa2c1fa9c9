"""The plain format: values, then indices (4 or 8 bytes each); decoding copies nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented

from sparcel import _cpu, kernels
from sparcel.errors import FormatError
from sparcel.formats.base import Encoded
from sparcel.formats.header import DTYPE_CODES, HEADER_BYTES, Header, padded
from sparcel.formats.parts import join, split
from sparcel.ops import Op
from sparcel.stream import SparseStream, dense_from


class Coo:
    """Writes values, then indices of 4 or 8 bytes each: a stream's tensors as they are.

    Dense streams are written without indices. Decoding returns views of the message.
    """

    kind = 0

    def encode(self, stream: SparseStream, start: int = 0) -> Encoded:
        """See `Format.encode`; encoding is exact, and ``start`` does not matter."""
        nnz = None if stream.is_dense else stream.nnz
        length = self.max_bytes(nnz, stream.size, stream.value_bytes)
        header = Header.of(stream, self.kind, length)
        parts = [stream.values.contiguous()]
        if stream.indices is not None:
            parts.append(stream.indices.contiguous())
        return Encoded(join(header, parts))

    def decode(self, message: Tensor, header: Header) -> SparseStream:
        """See `Format.decode`."""
        header.check("coo", self.max_bytes(header.sparse_nnz, header.size, header.value_bytes))
        values, rest = split(message, header)
        if header.dense:
            return SparseStream.unchecked(None, values, header.size, header.finite)
        index_bytes = header.nnz * header.index_dtype.itemsize
        indices = checked(rest[:index_bytes].view(header.index_dtype), header)
        return SparseStream.unchecked(indices, values, header.size, header.finite)

    def expected_bytes(self, nnz: float | None, size: float, value_bytes: int) -> float:
        """See `Format.expected_bytes`; messages with the same count have the same length."""
        return self.max_bytes(None if nnz is None else round(nnz), round(size), value_bytes)

    def max_bytes(self, nnz: int | None, size: int, value_bytes: int) -> int:
        """See `Format.max_bytes`."""
        if nnz is None:
            return HEADER_BYTES + padded(size * value_bytes)
        index_bytes = kernels.index_dtype(size).itemsize
        return HEADER_BYTES + padded(nnz * value_bytes) + padded(nnz * index_bytes)

    def dense_from(self, size: int, value_bytes: int) -> int:
        """See `Format.dense_from`: the count for tensors in memory, because the layout is equal."""
        return dense_from(size, value_bytes)

    def reduce_messages(
        self, messages: Sequence[Tensor], like: SparseStream, op: Op
    ) -> SparseStream | None:
        """See `Format.reduce_messages`.

        This needs two or more sparse messages of this format on the CPU, with scalar values and
        4-byte indices, and a built-in operation.
        """
        if like.width is not None or op.name is None or not messages[0].is_cpu or len(messages) < 2:
            return None
        arrays = [to_dlpack(message) for message in messages]
        code, threads = DTYPE_CODES[like.dtype], torch.get_num_threads()
        merged = _cpu.merge_messages(arrays, like.size, code, op.name, threads)
        if merged is None:
            return None
        indices, values, finite = merged
        return SparseStream.unchecked(indices, values, like.size, finite).compact(op)


COO = Coo()


def checked(indices: Tensor | None, header: Header) -> Tensor:
    """Return the indices that a message holds, sorted, unique and in range, or raise `FormatError`.

    None stands for packed indices that cannot be unpacked.
    """
    if indices is None:
        raise FormatError(f"corrupt message: it does not hold {header.nnz} packed indices")
    position = kernels.check_indices(indices, header.size)
    if position >= 0:
        raise FormatError(
            f"corrupt message: index {int(indices[position])} at position {position} is out of"
            f" order or outside [0, {header.size})"
        )
    return indices
