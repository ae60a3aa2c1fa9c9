"""A format: an index code times a value code; messages of streams, and how long they are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.device import all_of, finite_flag
from sparcel.core.formats.indices import INDEX_CODES, IndexCode
from sparcel.core.formats.message import (
    ALIGNMENT,
    DTYPE_CODES,
    HEADER_BYTES,
    Expected,
    Header,
    Message,
    message_of,
    padded,
    payload_of,
)
from sparcel.core.formats.values import PLAIN, VALUES_BY_NAME, ValueCode, value_code
from sparcel.core.ops import Op
from sparcel.core.stream import SparseStream, dense_from, value_bytes
from sparcel.errors import FormatError, InputError, MismatchError, checked_name


class Packet(NamedTuple):
    """A message, and the stream that every rank reads from it."""

    message: Message
    stream: SparseStream


@dataclass(frozen=True)
class Format:
    """How a stream is laid out in bytes: an index code times a value code.

    All ranks use the same format. A message's length follows from its stream's size, count of
    entries and dtype alone, so ranks agree on lengths. A stream of which many coordinates are
    stored travels dense, without indices: see `dense_from`; a region of a sum, with a bit for each
    coordinate: see `for_region`.

    Parameters
    ----------
    indices
        ``"raw"``: 32 or 64 bits an index. ``"packed"``: about log₂(size / entries) + 2 bits.
        ``"chunked"``: 12 bits, and 16 bits for each 4096 coordinates.
    values
        ``"plain"``: as they are. ``"float16"`` or ``"bfloat16"``: 16 bits. 2 to 8: so many bits,
        rounded to nearest, with a scale for a block of values. A `ValueCode`, such as `FewBits`
        with other settings. All but plain values lose something.

    Raises
    ------
    InputError
        For an unknown code.
    """

    indices: str = "raw"
    values: str | int | ValueCode = PLAIN

    def __post_init__(self) -> None:
        checked_name(self.indices, INDEX_CODES, "an index code")
        if isinstance(self.values, ValueCode):
            return
        name = str(self.values)
        object.__setattr__(
            self, "values", VALUES_BY_NAME[checked_name(name, VALUES_BY_NAME, "a value code")]
        )

    def __repr__(self) -> str:
        """Return the shortest call that makes it."""
        values = "" if self.value_code == PLAIN else f", {self.value_code!r}"
        return f"Format({self.indices!r}{values})"

    @property
    def name(self) -> str:
        """What `format_named` reads; values in few bits are named by their bits alone."""
        code = self.value_code
        return self.indices if code == PLAIN else f"{self.indices}:{code.name}"

    @property
    def index_code(self) -> IndexCode:
        """What writes indices."""
        return INDEX_CODES[self.indices]

    @property
    def value_code(self) -> ValueCode:
        """What writes values."""
        return cast(ValueCode, self.values)  # __post_init__ made one

    @property
    def loses(self) -> bool:
        """Whether messages may hold other values than the stream."""
        return self.value_code.loses

    @property
    def seed(self) -> int:
        """What decides random rounding, where there is any."""
        return self.value_code.seed

    @property
    def exact(self) -> Format:
        """The format with the same index code that loses nothing."""
        return Format(self.indices)

    def nbytes(self, nnz: float | None, size: float, value_bytes: int) -> int:
        """Return the bytes of a message with ``nnz`` of ``size`` coordinates.

        If ``nnz`` is None, the message is dense. Predictions use this function, so counts may be
        fractions, which are rounded. ``value_bytes`` are those of one coordinate's value, or row of
        values, in memory; they may be 0, for streams of indices alone. The bytes never fall when
        ``nnz`` rises.
        """
        size = round(size)
        count = size if nnz is None else round(nnz)
        places = 0 if nnz is None else self.index_code.nbytes(count, size)
        parts = (*self.value_code.part_bytes(count, value_bytes), places)
        return HEADER_BYTES + sum(map(padded, parts))

    def dense_from(self, size: int, value_bytes: int) -> int:
        """Return the count of entries from which a stream travels dense: where that is smaller.

        With packed indices and plain values of four bytes, these are 97 % of the coordinates.
        """
        if self == RAW:
            return dense_from(size, value_bytes)
        return _dense_from(self, size, value_bytes)

    def for_region(self, nnz: int, size: int, value_bytes: int) -> Format | None:
        """Return the format in which a region of a sum travels, or None if it travels dense.

        A region is dense where all of its coordinates are stored. A sum must not forget which are,
        so from `dense_from` on its indices are packed, mostly as a bit for each coordinate. Only
        where values are rounded does it travel dense as soon as that takes fewer bytes.
        """
        if nnz < self.dense_from(size, value_bytes):
            return self
        packed = Format("packed", self.values)
        all_stored = packed.dense_from(size, value_bytes) if self.loses else size
        return packed if nnz < all_stored else None

    def holds(self, dtype: torch.dtype, width: int | None) -> bool:
        """Tell whether messages can hold values of that dtype, in rows of that width."""
        return not self.loses or (width is None and dtype.is_floating_point)

    def check_holds(self, dtype: torch.dtype, width: int | None) -> None:
        """Raise `InputError` if values of that dtype, in rows of that width, cannot be rounded."""
        if not self.holds(dtype, width):
            raise InputError(
                f"the format {self.name!r} rounds scalar floats, got {dtype}, width {width}; use"
                f" {self.exact.name!r}, which loses nothing"
            )

    def encode(self, stream: SparseStream, key: int = 0) -> Packet:
        """Return the message of a stream, sparse or dense, and the stream that it holds.

        ``key`` decides random rounding. A stream of which a value is NaN or Inf is not ``finite``.

        Raises
        ------
        InputError
            When the value code cannot hold rows, or integers.
        """
        code = self.value_code
        self.check_holds(stream.dtype, stream.width)
        parts, values = code.encode(stream.values.contiguous(), key)
        held = stream
        if code.loses:
            finite = all_of([stream.finite, finite_flag(values)])
            held = SparseStream.unchecked(stream.indices, values, stream.size, finite)
        parts = list(parts)
        if stream.indices is not None:
            parts.append(self.index_code.encode(stream.indices, stream.size))
        nnz = None if stream.is_dense else stream.nnz
        length = self.nbytes(nnz, stream.size, stream.value_bytes)
        header = self.blank_header(stream.size, stream.dtype, stream.is_dense)._replace(
            nnz=stream.nnz, width=stream.width, finite=held.finite, length=length
        )
        return Packet(message_of(header, parts), held)

    def blank_header(self, size: int, dtype: torch.dtype, dense: bool) -> Header:
        """Return the header of a finite stream of scalars, whose counts and length are not known.

        Compiled passes fill in the rest.
        """
        code, index_code = self.value_code, 0 if dense else list(INDEX_CODES).index(self.indices)
        return Header(index_code, code.number, code.detail, dtype, size, 0, None, dense, True, 0)

    def decode(self, payload: Tensor, header: Header) -> SparseStream:
        """Return the stream in ``payload``; the tensors may be views of it.

        Raises
        ------
        FormatError
            When the message contradicts its header or itself. Decoding never reads out of bounds.
        """
        code, nnz = self.value_code, None if header.dense else header.nnz
        one = value_bytes(header.dtype, header.width)
        expected = self.nbytes(nnz, header.size, one)
        if header.length != expected:
            raise FormatError(
                f"a {self.name} message of {header.nnz} coordinates takes {expected} bytes,"
                f" its header says {header.length}"
            )
        if not self.holds(header.dtype, header.width):
            raise FormatError(
                f"a {self.name} message cannot hold {header.dtype}, width {header.width}"
            )
        parts, start = [], 0
        for nbytes in code.part_bytes(header.nnz, one):
            parts.append(payload[start : start + nbytes])
            start += padded(nbytes)
        values = code.decode(parts, header.nnz, header.dtype)
        if header.width is not None:
            values = values.view(header.nnz, header.width)
        if nnz is None:
            return SparseStream.unchecked(None, values, header.size, header.finite)
        places = self.index_code.nbytes(nnz, header.size)
        indices = self.index_code.decode(payload[start : start + places], nnz, header.size)
        return SparseStream.unchecked(indices, values, header.size, header.finite)


RAW = Format()
"""Indices and values as they are in memory."""


def format_named(format: str | Format, argument: str = "format") -> Format:
    """Return a format, or the one of that name, such as ``"packed"`` or ``"packed:4"``.

    Errors call it ``argument``.

    Raises
    ------
    InputError
        For an unknown name, or anything else.
    """
    if isinstance(format, Format):
        return format
    return _NAMED[checked_name(format, _NAMED, argument)]


_NAMED = {indices: Format(indices) for indices in INDEX_CODES} | {
    f"{indices}:{values}": Format(indices, values)
    for indices in INDEX_CODES
    for values in VALUES_BY_NAME
}


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


def merge_messages(messages: Sequence[Message], like: SparseStream, op: Op) -> SparseStream | None:
    """Reduce the streams of messages without decoding them, in the order given.

    This needs two or more sparse `RAW` messages on the CPU, with scalar values and 4-byte indices,
    and a built-in operation; the result is None for others.
    """
    if like.width is not None or op.name is None or not messages[0][-1].is_cpu or len(messages) < 2:
        return None
    merged = kernels.merge_messages(messages, like.size, DTYPE_CODES[like.dtype], op)
    if merged is None:
        return None
    indices, values, finite = merged
    return SparseStream.unchecked(indices, values, like.size, finite)


@lru_cache(maxsize=4096)
def _dense_from(format: Format, size: int, value_bytes: int) -> int:
    """Return `Format.dense_from`: the smallest count whose sparse message is longer."""
    dense = format.nbytes(None, size, value_bytes)
    # With all coordinates the sparse message is longer, since it has indices.
    shorter = bisect_right(
        range(size), dense, key=lambda nnz: format.nbytes(nnz, size, value_bytes)
    )
    return max(shorter, 1)


@lru_cache(maxsize=64)
def _format_of(index_code: int, number: int, detail: int) -> Format:
    """Return the format that a header names."""
    if index_code >= len(INDEX_CODES):
        raise FormatError(
            f"unknown index code {index_code}; install the same release on every rank"
        )
    return Format(list(INDEX_CODES)[index_code], value_code(number, detail))


class Lengths(NamedTuple):
    """The lengths of messages of one kind of stream; counts may be fractions, as expected ones are.

    Attributes
    ----------
    size
        Coordinates of a stream, where a method is not told of another number.
    value_bytes
        Of a coordinate's value, or row of values, in memory.
    """

    format: Format
    size: int
    value_bytes: int

    def message(self, nnz: float, size: int | None = None) -> float:
        """Return the bytes of a message of ``nnz`` of ``size`` coordinates, sparse or dense."""
        dense = self.is_dense(nnz, size)
        return self.dense_message(size) if dense else self.sparse_message(nnz, size)

    def region_message(self, nnz: float, size: int) -> int:
        """Return the bytes of the message of a region of a sum: see `Format.for_region`."""
        format = self.format.for_region(round(nnz), size, self.value_bytes)
        if format is None:
            return self.dense_message(size)
        return format.nbytes(nnz, size, self.value_bytes)

    def sparse_message(self, nnz: float, size: int | None = None) -> int:
        """Return the bytes of a message of ``nnz`` of ``size`` coordinates that stays sparse."""
        return self.format.nbytes(nnz, self.size if size is None else size, self.value_bytes)

    def dense_message(self, size: int | None = None) -> int:
        """Return the bytes of a message of all of ``size`` coordinates, without indices."""
        return self.format.nbytes(None, self.size if size is None else size, self.value_bytes)

    def most_bytes(self, nnz: float | None, size: int | None = None) -> int:
        """Return the most bytes of a message of up to ``nnz`` coordinates, also of a region.

        ``nnz`` None bounds nothing.
        """
        size = self.size if size is None else size
        dense_from = self.format.dense_from(size, self.value_bytes)
        if nnz is not None and nnz < dense_from:
            return self.sparse_message(int(nnz), size)
        all_but_one = size - 1 if nnz is None else min(int(nnz), size - 1)
        return max(
            self.dense_message(size),
            self.sparse_message(min(dense_from - 1, size), size),
            self.region_message(max(all_but_one, 0), size),
        )

    def is_dense(self, nnz: float, size: int | None = None) -> bool:
        """Tell whether so many coordinates travel dense."""
        size = self.size if size is None else size
        return nnz >= self.format.dense_from(size, self.value_bytes)
