"""The plain format: values, then indices (4 or 8 bytes each); decoding makes views, no copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented

from sparcel import _cpu, kernels
from sparcel.errors import FormatError
from sparcel.formats.header import ALIGNMENT, DTYPE_CODES, HEADER_BYTES, Header, padded
from sparcel.ops import Op
from sparcel.stream import SparseStream

KIND = 0


def message_bytes(
    nnz: int, size: int, dtype: torch.dtype, width: int | None, dense: bool = False
) -> int:
    """Return the bytes of the message that holds ``nnz`` coordinates of ``size``."""
    columns = 1 if width is None else width
    index_bytes = 0 if dense else nnz * kernels.index_dtype(size).itemsize
    return HEADER_BYTES + padded(nnz * columns * dtype.itemsize) + padded(index_bytes)


def encode(stream: SparseStream) -> Tensor:
    """Return the message, uint8, that holds ``stream`` as it is, sparse or dense."""
    length = message_bytes(stream.nnz, stream.size, stream.dtype, stream.width, stream.is_dense)
    header = Header(
        kind=KIND,
        dtype=stream.dtype,
        size=stream.size,
        nnz=stream.nnz,
        width=stream.width,
        dense=stream.is_dense,
        finite=stream.finite,
        wide_indices=kernels.index_dtype(stream.size) == torch.int64,
        length=length,
    )
    parts = [header.pack().to(stream.device), *_aligned(stream.values)]
    if stream.indices is not None:
        parts += _aligned(stream.indices.to(torch.int64 if header.wide_indices else torch.int32))
    return torch.cat(parts)


def decode(message: Tensor, header: Header) -> SparseStream:
    """Return the stream in ``message``, as views of it.

    Raises
    ------
    FormatError
        When the length does not fit the counts, or the indices are unsorted or out of range.
    """
    index_dtype = torch.int64 if header.wide_indices else torch.int32
    expected = message_bytes(header.nnz, header.size, header.dtype, header.width, header.dense)
    if index_dtype != kernels.index_dtype(header.size):
        raise FormatError(f"{index_dtype} indices do not belong to a stream of size {header.size}")
    if header.length != expected:
        raise FormatError(
            f"a coo message of {header.nnz} coordinates takes {expected} bytes,"
            f" its header says {header.length}"
        )
    values, indices = _parts(message, header)
    if header.dense:
        return SparseStream.unchecked(None, values, header.size, header.finite)
    position = kernels.check_indices(indices, header.size)
    if position >= 0:
        raise FormatError(
            f"corrupt message: index {int(indices[position])} at position {position} is out of"
            f" order or outside [0, {header.size})"
        )
    return SparseStream.unchecked(indices, values, header.size, header.finite)


def reduce_messages(messages: Sequence[Tensor], like: SparseStream, op: Op) -> SparseStream | None:
    """Reduce the streams of messages in one go, as decoding and `sparcel.stream.reduce` would.

    Returns None where that takes decoding: for messages that are not plain, sparse, of scalars and
    like ``like``, and for operations of a user's.
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


def _aligned(part: Tensor) -> list[Tensor]:
    """Return the bytes of a tensor, and those that pad it."""
    flat = part if part.ndim == 1 else part.reshape(-1)
    if flat.stride(0) != 1:  # a lone entry may have any stride and count as contiguous
        flat = flat.new_empty(flat.numel()).copy_(flat)
    content = flat.view(torch.uint8)
    padding = -content.numel() % ALIGNMENT
    return [content, content.new_zeros(padding)] if padding else [content]


def _parts(message: Tensor, header: Header) -> tuple[Tensor, Tensor]:
    """Return the views of ``message`` that hold the values and the indices."""
    columns = 1 if header.width is None else header.width
    values_end = HEADER_BYTES + header.nnz * columns * header.dtype.itemsize
    values = message[HEADER_BYTES:values_end].view(header.dtype)
    if header.width is not None:
        values = values.view(header.nnz, header.width)
    start = HEADER_BYTES + padded(values_end - HEADER_BYTES)
    index_dtype = torch.int64 if header.wide_indices else torch.int32
    stored = 0 if header.dense else header.nnz
    return values, message[start : start + stored * index_dtype.itemsize].view(index_dtype)
