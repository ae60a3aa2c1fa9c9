"""Decoding by the format that a message names, and the bounds that receivers rely on."""

from __future__ import annotations

import torch
from torch import Tensor

from sparcel.errors import FormatError, MismatchError
from sparcel.formats import coo, qsgd
from sparcel.formats.header import ALIGNMENT, Header
from sparcel.stream import SparseStream

_DECODERS = {coo.KIND: coo.decode, qsgd.KIND: qsgd.decode}

encode, reduce_messages = coo.encode, coo.reduce_messages


def decode(message: Tensor, like: SparseStream | None = None) -> SparseStream:
    """Return the stream at the start of ``message``.

    Parameters
    ----------
    message
        uint8. The stream's tensors are views of it where it lies on a multiple of 8 bytes.
    like
        A stream of the size, dtype and width that are due; None accepts any.

    Raises
    ------
    FormatError
        When the message is truncated, corrupt or foreign.
    MismatchError
        When it holds another size, dtype or width than ``like``.
    """
    header = Header.parse(message)
    if header.kind not in _DECODERS:
        raise FormatError(f"unknown format {header.kind}; install the same release on every rank")
    found = (header.size, header.dtype, header.width)
    expected = found if like is None else (like.size, like.dtype, like.width)
    if found != expected:
        raise MismatchError(
            "a stream of {}, where one of {} was expected".format(
                *(f"size {s}, {d}, width {w}" for s, d, w in (found, expected))
            )
        )
    if message.numel() > header.length:
        message = message[: header.length]
    if message.storage_offset() % ALIGNMENT or message.data_ptr() % ALIGNMENT:
        message = message.clone()
    return _DECODERS[header.kind](message, header)


def decode_all(buffer: Tensor) -> list[Tensor]:
    """Cut a buffer of messages that follow each other into the messages."""
    messages: list[Tensor] = []
    while left := buffer.numel():
        length = Header.parse(buffer).length
        if length == left:
            return [*messages, buffer]
        messages.append(buffer[:length])
        buffer = buffer[length:]
    return messages


def max_bytes(size: int, dtype: torch.dtype, width: int | None, max_nnz: int | None = None) -> int:
    """Return the most bytes that a compact stream takes: dense, or ``max_nnz`` coordinates."""
    # A sparse stream that is just not larger than the dense one may be so by its padding.
    dense = coo.message_bytes(size, size, dtype, width, dense=True) + ALIGNMENT
    if max_nnz is None or max_nnz >= size:
        return dense
    return min(dense, coo.message_bytes(max_nnz, size, dtype, width))
