"""Messages of any format: decoding by the header, and cutting joined messages apart."""

from __future__ import annotations

from torch import Tensor

from sparcel.errors import FormatError, MismatchError
from sparcel.formats.base import Expected, Format
from sparcel.formats.coo import COO
from sparcel.formats.header import ALIGNMENT, Header
from sparcel.formats.packed import Packed
from sparcel.formats.qsgd import Qsgd
from sparcel.stream import SparseStream

FORMATS: dict[int, Format] = {one.kind: one for one in (COO, Qsgd(bits=8), Packed())}
"""The decoder of each kind of message. A message holds its own parameters, so any `Qsgd` decodes
the messages of every other `Qsgd`."""

FORMATS_BY_NAME: dict[str, Format] = {"coo": COO, "packed": Packed()}
"""The formats that lose nothing, by the names that users type."""


def decode(
    message: Tensor, like: Expected | SparseStream | None = None, format: Format | None = None
) -> SparseStream:
    """Return the stream at the start of ``message``.

    Parameters
    ----------
    message
        uint8. If its address is a multiple of 8 bytes, the stream's tensors may be views of it.
    like
        Has the expected size, dtype and width; None accepts any.
    format
        A format that is decoded in addition to those of `FORMATS`.

    Raises
    ------
    FormatError
        When the message is truncated, corrupt or foreign.
    MismatchError
        When the stream has another size, dtype or width than ``like``.
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
            "a stream of {}, but one of {} was expected".format(
                *(f"size {s}, {d}, width {w}" for s, d, w in (found, expected))
            )
        )
    if message.numel() > header.length:
        message = message[: header.length]
    if message.storage_offset() % ALIGNMENT or message.data_ptr() % ALIGNMENT:
        message = message.clone()
    return decoder.decode(message, header)


def decode_all(buffer: Tensor) -> list[Tensor]:
    """Cut a buffer of consecutive messages into a list of messages."""
    messages: list[Tensor] = []
    while left := buffer.numel():
        length = Header.parse(buffer).length
        if length == left:
            return [*messages, buffer]
        messages.append(buffer[:length])
        buffer = buffer[length:]
    return messages
