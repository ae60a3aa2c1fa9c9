"""A message: a header, which is control, and the payload: the values, then their places.

The header's 40 bytes alone tell how long the payload is, and what it holds. Where both lie in the
same memory, as on the CPU, a message is one tensor. Otherwise it is two, and the payload's device
is that of the stream. Several messages travel joined: all headers come first, so whoever reads
these knows where the payloads begin and end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core._checks import VALUE_DTYPES
from sparcel.core.device import put, read
from sparcel.core.kernels import WORD
from sparcel.core.stream import SparseStream
from sparcel.errors import FormatError, InputError

_LAYOUT = struct.Struct("<4sBBBBIIQQQ")
_MAGIC = b"SPCL"
_VERSION = 3
_DENSE, _NON_FINITE, _ROWS = 1, 2, 8
VOID = _NON_FINITE << 56
"""What the first 8 bytes of a header have as well, as an integer, if its stream is not finite."""
DTYPE_CODES = {dtype: code for code, dtype in enumerate(VALUE_DTYPES)}
_LARGEST_SIZE = 2**63 - 1  # indices are int64
_WIDEST = 2**32 - 1

HEADER_BYTES = _LAYOUT.size
ALIGNMENT = WORD
"""Every part of a message is padded to a multiple of this, so that parts can be viewed in place."""


def padded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment of a message's parts."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def message_length(message: Tensor) -> int:
    """Return how many bytes a message says it has; it is on the host.

    Raises
    ------
    FormatError
        When it is shorter than a header.
    """
    _check_header(message)
    length: int = _LAYOUT.unpack_from(message.numpy().data)[-1]
    return length


def _check_header(message: Tensor) -> None:
    """Raise `FormatError` when a message is shorter than a header."""
    if message.numel() < HEADER_BYTES:
        raise FormatError(
            f"message of {message.numel()} bytes is shorter than a header ({HEADER_BYTES})"
        )


class Header(NamedTuple):
    """The fields of a message's header.

    ``index_code`` and ``value_code`` are the codes' numbers; ``detail`` holds the value code's
    settings, in 24 bits. ``length`` counts the bytes of the whole message, header included.
    ``finite`` is that of the stream, and a bool in a header that was received.
    """

    index_code: int
    value_code: int
    detail: int
    dtype: torch.dtype
    size: int
    nnz: int
    width: int | None
    dense: bool
    finite: bool | Tensor
    length: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the message after the header."""
        return self.length - HEADER_BYTES

    def pack(self) -> bytes:
        """Return the header's bytes, ``HEADER_BYTES`` of them.

        Raises
        ------
        InputError
            When rows are wider than a header can say.
        """
        if self.width is not None and self.width > _WIDEST:
            raise InputError(f"rows of a message have at most {_WIDEST} values, got {self.width}")
        flags = (
            _DENSE * self.dense | _NON_FINITE * (not self.finite) | _ROWS * (self.width is not None)
        )
        return _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            self.index_code,
            DTYPE_CODES[self.dtype],
            flags,
            self.width or 0,
            self.value_code | self.detail << 8,
            self.size,
            self.nnz,
            self.length,
        )

    @classmethod
    def parse(cls, control: Tensor) -> Self:
        """Read the header at the start of ``control``.

        Raises
        ------
        FormatError
            When it is too short, was not written by sparcel, has another version, or contradicts
            itself.
        """
        _check_header(control)
        # Control is on the host, except in a message that was scattered, as long broadcasts are.
        start = read(control[:HEADER_BYTES])
        fields = _LAYOUT.unpack_from(start.numpy().data)
        magic, version, index_code, code, flags, width, values, size, nnz, length = fields
        if magic != _MAGIC:
            raise FormatError(f"not a sparcel message: it begins with {magic!r}, not {_MAGIC!r}")
        if version != _VERSION:
            raise FormatError(
                f"message of version {version}, this sparcel reads version {_VERSION};"
                " install the same release on every rank"
            )
        if flags & ~(_DENSE | _NON_FINITE | _ROWS):
            raise FormatError(f"unknown flags {flags:#x} in the header")
        if code >= len(VALUE_DTYPES):
            raise FormatError(f"unknown dtype code {code} in the header")
        dense = bool(flags & _DENSE)
        if nnz > size or (dense and nnz != size) or size > _LARGEST_SIZE:
            raise FormatError(f"header counts {nnz} stored coordinates of {size}, dense={dense}")
        if length % ALIGNMENT:
            raise FormatError(f"header says {length} bytes, not a multiple of {ALIGNMENT}")
        if length < HEADER_BYTES:
            raise FormatError(f"header says {length} bytes, fewer than its own")
        finite, rows = not flags & _NON_FINITE, width if flags & _ROWS else None
        value_code, detail, dtype = values & 0xFF, values >> 8, VALUE_DTYPES[code]
        return cls(index_code, value_code, detail, dtype, size, nnz, rows, dense, finite, length)


@dataclass(frozen=True)
class Expected:
    """What a rank knows of a stream before it arrives.

    Attributes
    ----------
    size, dtype, width
        As of the stream.
    max_nnz
        The most entries that it can have; None where nothing bounds them.
    stays_sparse
        Whether the sender keeps it sparse even where the dense form takes fewer bytes.
    """

    size: int
    dtype: torch.dtype
    width: int | None
    max_nnz: int | None = None
    stays_sparse: bool = False

    @classmethod
    def like(
        cls,
        stream: SparseStream,
        max_nnz: int | None = None,
        size: int | None = None,
        stays_sparse: bool = False,
    ) -> Self:
        """Expect a stream like ``stream``, of its size or of ``size``."""
        size = stream.size if size is None else size
        return cls(size, stream.dtype, stream.width, max_nnz, stays_sparse)


Message: TypeAlias = Sequence[Tensor]
"""Bytes (uint8): the header and the payload, or one tensor that holds both."""


def message_of(header: Header, parts: Sequence[Tensor]) -> Message:
    """Return the message of a header and the payload's contiguous parts, each padded."""
    if isinstance(header.finite, Tensor):
        certain = header._replace(finite=True).pack()
        return kernels.join_message(parts, certain, header.finite, VOID)
    return kernels.join_message(parts, header.pack())


def payload_of(message: Message) -> Tensor:
    """Return the bytes after the header."""
    return message[1] if len(message) == 2 else message[0][HEADER_BYTES:]


def nbytes_of(message: Message) -> int:
    """Return the bytes of a message."""
    return sum([part.numel() for part in message])


def whole(message: Message) -> Tensor:
    """Return a message in one tensor, on the payload's device."""
    if len(message) == 1:
        return message[0]
    place = message[-1].device
    return torch.cat([put(part, place, part.dtype) if part.is_cpu else part for part in message])


def joined(messages: Sequence[Message]) -> Message:
    """Return the parts of several messages in one: the headers, then the payloads."""
    if len(messages) == 1:
        return messages[0]
    headers = [m[0] if len(m) == 2 else m[0][:HEADER_BYTES] for m in messages]
    return [*headers, *map(payload_of, messages)]


def cut(parts: Sequence[Tensor], count: int) -> list[Message]:
    """Return the ``count`` messages that `joined` has joined; only the headers are read.

    Parameters
    ----------
    parts
        As a communicator returns them: whole, the headers and the payloads apart, or as `joined`.

    Raises
    ------
    FormatError
        When the bytes are not so many messages.
    """
    if count == 1:
        return [parts]
    if len(parts) == 1:
        parts = (parts[0][: count * HEADER_BYTES], parts[0][count * HEADER_BYTES :])
    if len(parts) == 2:
        control, payload = parts
        headers = control.split(HEADER_BYTES)
        lengths = [Header.parse(header).payload_bytes for header in headers]
        if len(headers) != count or sum(lengths) != payload.numel():
            raise FormatError(
                f"{len(headers)} of {count} headers, which announce {sum(lengths)} bytes, and"
                f" {payload.numel()} bytes"
            )
        parts = (*headers, *payload.split(lengths))
    if len(parts) != 2 * count:
        raise FormatError(f"{len(parts)} parts are not {count} headers and payloads")
    return list(zip(parts[:count], parts[count:], strict=True))
