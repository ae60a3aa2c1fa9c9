"""Messages of any format: decoding by the header, and cutting joined messages apart."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparcel.errors import FormatError, MismatchError
from sparcel.formats.base import Format
from sparcel.formats.coo import COO
from sparcel.formats.header import ALIGNMENT, Header
from sparcel.formats.qsgd import Qsgd
from sparcel.stream import SparseStream

FORMATS: dict[int, Format] = {one.kind: one for one in (COO, Qsgd(bits=8))}
"""Who decodes messages of each kind. What a message needs beyond its kind stands in the message, so
any `Qsgd` reads those of all others."""


class Vector(Protocol):
    """What a decoded stream is compared with."""

    @property
    def size(self) -> int:
        """Number of coordinates."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""

    @property
    def width(self) -> int | None:
        """Number of columns of a row, None for scalar values."""


def decode(
    message: Tensor, like: Vector | None = None, format: Format | None = None
) -> SparseStream:
    """Return the stream at the start of ``message``.

    Parameters
    ----------
    message
        uint8. The stream's tensors may be views of it where it lies on a multiple of 8 bytes.
    like
        The size, dtype and width that are due; None accepts any.
    format
        A format that is decoded beside those of `FORMATS`.

    Raises
    ------
    FormatError
        When the message is truncated, corrupt or foreign.
    MismatchError
        When it holds another size, dtype or width than ``like``.
    """
    header = Header.parse(message)
    decoder = FORMATS.get(header.kind)
    if format is not None and header.kind == format.kind:
        decoder = format
    if decoder is None:
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
    return decoder.decode(message, header)


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
