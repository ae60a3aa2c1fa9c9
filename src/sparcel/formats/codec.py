"""Messages of any format: decoding by the header."""

from __future__ import annotations

from functools import lru_cache

from sparcel.errors import FormatError, MismatchError
from sparcel.formats.expected import Expected
from sparcel.formats.format import Format
from sparcel.formats.header import ALIGNMENT, HEADER_BYTES, Header
from sparcel.formats.indices import INDEX_CODES
from sparcel.formats.message import Message, payload_of
from sparcel.formats.values import value_code
from sparcel.stream import SparseStream


def decode(message: Message, like: Expected | SparseStream | None = None) -> SparseStream:
    """Return the stream at the start of ``message``.

    Parameters
    ----------
    message
        If its address is a multiple of 8 bytes, the stream's tensors may be views of it.
    like
        Has the expected size, dtype and width; None accepts any.

    Raises
    ------
    FormatError
        When the message is truncated, corrupt or foreign.
    MismatchError
        When the stream has another size, dtype or width than ``like``.
    """
    header, payload = Header.parse(message[0]), payload_of(message)
    format = _format_of(header.index_code, header.value_code, header.detail)
    found = (header.size, header.dtype, header.width)
    expected = found if like is None else (like.size, like.dtype, like.width)
    if found != expected:
        raise MismatchError(
            "a stream of {}, but one of {} was expected".format(
                *(f"size {s}, {d}, width {w}" for s, d, w in (found, expected))
            )
        )
    if payload.numel() < header.payload_bytes:
        raise FormatError(
            f"truncated message: its header says {header.length} bytes,"
            f" {HEADER_BYTES + payload.numel()} are there"
        )
    if payload.storage_offset() % ALIGNMENT or payload.data_ptr() % ALIGNMENT:
        payload = payload.clone()
    return format.decode(payload, header)


@lru_cache(maxsize=64)
def _format_of(index_code: int, number: int, detail: int) -> Format:
    """Return the format that a header names."""
    if index_code >= len(INDEX_CODES):
        raise FormatError(
            f"unknown index code {index_code}; install the same release on every rank"
        )
    return Format(list(INDEX_CODES)[index_code], value_code(number, detail))
