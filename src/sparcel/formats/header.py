"""The 40-byte header of every message: its codes, the stream's kind, and the counts.

The header is the message's control: it alone tells how long the payload is, and what it holds.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, Self

import torch
from torch import Tensor

from sparcel import device
from sparcel.errors import FormatError, InputError
from sparcel.kernels import WORD

_LAYOUT = struct.Struct("<4sBBBBIIQQQ")
_MAGIC = b"SPCL"
_VERSION = 3
_DENSE, _NON_FINITE, _ROWS = 1, 2, 8
VOID = _NON_FINITE << 56
"""What the first 8 bytes of a header have as well, as an integer, if its stream is not finite."""
_DTYPES = {
    0: torch.float16,
    1: torch.bfloat16,
    2: torch.float32,
    3: torch.float64,
    4: torch.int32,
    5: torch.int64,
}
DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}
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
    def value_bytes(self) -> int:
        """Bytes of one coordinate's value, or of its row of values."""
        return self.dtype.itemsize * (1 if self.width is None else self.width)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the message after the header."""
        return self.length - HEADER_BYTES

    @property
    def sparse_nnz(self) -> int | None:
        """The count of entries; None if the message is dense."""
        return None if self.dense else self.nnz

    def check(self, format: str, expected_bytes: int, floats: bool) -> None:
        """Raise `FormatError` unless the counts fit the message's length.

        ``floats`` tells that the format takes scalar floats alone.
        """
        if self.length != expected_bytes:
            raise FormatError(
                f"a {format} message of {self.nnz} coordinates takes {expected_bytes} bytes,"
                f" its header says {self.length}"
            )
        if floats and (self.width is not None or not self.dtype.is_floating_point):
            raise FormatError(f"a {format} message cannot hold {self.dtype}, width {self.width}")

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
        start = device.read(control[:HEADER_BYTES])
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
        if code not in _DTYPES:
            raise FormatError(f"unknown dtype code {code} in the header")
        dense = bool(flags & _DENSE)
        if nnz > size or (dense and nnz != size) or size > _LARGEST_SIZE:
            raise FormatError(f"header counts {nnz} stored coordinates of {size}, dense={dense}")
        if length % ALIGNMENT:
            raise FormatError(f"header says {length} bytes, not a multiple of {ALIGNMENT}")
        if length < HEADER_BYTES:
            raise FormatError(f"header says {length} bytes, fewer than its own")
        finite, rows = not flags & _NON_FINITE, width if flags & _ROWS else None
        value_code, detail, dtype = values & 0xFF, values >> 8, _DTYPES[code]
        return cls(index_code, value_code, detail, dtype, size, nnz, rows, dense, finite, length)
