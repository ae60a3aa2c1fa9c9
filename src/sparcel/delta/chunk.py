"""The layout of a chunk, which is documented in ``docs/reference/deltas-layout.md``."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sparcel import _cpu
from sparcel.delta.bits import NAMED, Layout
from sparcel.delta.pieces import MOST_DIMS, MOST_PIECES, Piece, whole_piece
from sparcel.errors import FormatError, InputError, SparcelError, shown

WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What Python raises when data have another form than was expected."""
_START = struct.Struct("<4sIII")
_MAGIC = b"SPD1"
_MOST_HEADER = 16 << 20
_FREE, _RATIO = 4 << 10, 32
"""A header may unpack to so many bytes, and so many more for each byte that it has packed. Names of
tensors shrink to about a twenty-fifth, and nothing that is worth reading to a thousandth."""
_MOST_NESTED = 1 << 17
"""Most lists and objects in a header, and brackets in its names: each takes dozens of bytes."""
MOST_SHARDS = (1 << 20) - 1
MOST_NUMBER = (1 << 63) - 1
"""The largest number of a version."""
_MOST_ELEMENTS = 1 << 24
CHUNK_CODES = ("steps", "values", "dense", "removed")
"""What a chunk may hold of each changed element: a step in units in the last place, the new value,
the new values of all elements, or nothing, because the tensor is gone."""


@contextmanager
def malformed(what: str, way_out: str = "") -> Iterator[None]:
    """Raise FormatError if the block, which parses something, meets anything unexpected."""
    try:
        yield
    except SparcelError:
        raise
    except (*WRONG, zlib.error) as error:
        hint = f"; {way_out}" if way_out else ""
        raise FormatError(f"{what}: {shown(repr(error))}{hint}") from None


@dataclass(frozen=True)
class Version:
    """A version of the weights: its number, and the sum of its elements, which tells it apart."""

    number: int
    sum: int

    def after(self, number: int, change: int) -> Version:
        """Return the version that has this number, and this change of the sum."""
        return Version(number, (self.sum + change) % (1 << 64))

    def stated(self) -> tuple[int, str]:
        """Return it as files state it: the sum in hexadecimal."""
        return self.number, f"{self.sum:016x}"

    @classmethod
    def read(cls, stated: Sequence[Any]) -> Version:
        """Return the version that a file states, or raise ValueError or TypeError."""
        number, total = stated
        return cls(whole(number), whole(int(total, 16), 1 << 64))

    def __str__(self) -> str:
        return "{} ({})".format(*self.stated())


@dataclass(frozen=True)
class Chunk:
    """What a chunk says.

    Attributes
    ----------
    base
        The version that it applies to.
    target
        The number of the version that all chunks of a version make of it.
    shard, shards
        Which process encoded it, of how many that encode a version together.
    part, last
        Its number among the chunks of that process, and whether no other follows.
    code
        One of `CHUNK_CODES`.
    layout
        Of its tensors' dtype.
    pieces
        What its elements are of.
    new
        Whether the tensors do not exist in the base.
    limits, changes
        Of the classes of exponents, from the largest: the least exponent of all but the last, and
        how many elements change in each. Without limits, places do not depend on the base.
    sum
        What the changes add to the sum of the version.
    ties
        In the last chunk: the tensors that are tied in the new version, and to which ones. Only
        these count in sums.
    untied
        In the last chunk: those that were tied in the base, and are not any more.
    streams
        The coded places, the coded values, and the plain bits of both; or all elements.
    lengths
        Of the first two streams, in bytes.
    """

    base: Version
    target: int
    code: str
    layout: Layout
    pieces: tuple[Piece, ...]
    sum: int
    shard: int = 0
    shards: int = 1
    part: int = 0
    last: bool = False
    new: bool = False
    limits: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()
    lengths: tuple[int, int] = (0, 0)
    ties: Mapping[str, str] = field(default_factory=dict)
    untied: tuple[str, ...] = ()
    streams: bytes | memoryview = field(default=b"", repr=False)

    @property
    def changed(self) -> int:
        """The number of elements that change."""
        return self.elements if self.code == "dense" else sum(self.changes)

    @property
    def leaving(self) -> set[str]:
        """The names of tensors that are gone, or come as new ones."""
        removed = self.pieces if self.code == "removed" else ()
        return {*self.untied, *(piece.name for piece in removed)}

    @property
    def elements(self) -> int:
        """The number of elements, changed or not."""
        return sum(piece.count for piece in self.pieces)

    def to_bytes(self) -> bytes:
        """Write the chunk.

        Raises
        ------
        InputError
            If its header would be longer than readers take.
        """
        header = {
            "base": self.base.stated(),
            "target": self.target,
            "shard": [self.shard, self.shards],
            "part": self.part,
            "last": self.last,
            "code": self.code,
            "dtype": self.layout.name,
            "pieces": [_described(piece) for piece in self.pieces],
            "sum": f"{self.sum:016x}",
            "new": self.new,
            "limits": self.limits,
            "changes": self.changes,
            "ties": dict(self.ties),
            "untied": self.untied,
            "streams": [*self.lengths, len(self.streams) - sum(self.lengths)],
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > _MOST_HEADER or _nested(text) > _MOST_NESTED:
            raise InputError(
                f"a chunk's names take {len(text)} bytes with {_nested(text)} brackets, and may"
                f" take {_MOST_HEADER} with {_MOST_NESTED}: shorten them"
            )
        packings = (zlib.compress(text, level) for level in (9, 1, 0))
        packed = next(one for one in packings if len(text) <= _most_text(len(one)))
        body = b"".join([packed, self.streams, bytes(_cpu.CODE_SLACK)])
        return _START.pack(_MAGIC, len(packed), zlib.crc32(body), 0) + body


def read_chunk(data: bytes | memoryview) -> Chunk:
    """Read a chunk, whose streams stay where they are.

    Raises
    ------
    FormatError
        If the bytes are not those of a whole chunk. What its streams say is not checked.
    """
    view = memoryview(data)
    if len(view) < _START.size:
        raise FormatError(f"a chunk has at least {_START.size} bytes, got {len(view)}")
    magic, length, crc, _ = _START.unpack_from(view)
    if magic != _MAGIC:
        raise FormatError(f"a chunk begins with {_MAGIC!r}, got {bytes(magic)!r}")
    body = view[_START.size :]
    if zlib.crc32(body) != crc:
        raise FormatError("a chunk is torn or corrupt: its checksum does not match")
    with malformed("a chunk's header is wrong"):
        return _parsed(_header(body[:length]), body[length:])


def _header(packed: memoryview) -> dict[str, Any]:
    unpacker, most = zlib.decompressobj(), _most_text(len(packed))
    text = unpacker.decompress(packed, most + 1)  # of 0 it would take for no limit
    if not unpacker.eof or len(text) > most:
        raise ValueError(f"it is torn, or longer than {most} bytes")
    if _nested(text) > _MOST_NESTED:
        raise ValueError(f"it has {_nested(text)} brackets")
    header: dict[str, Any] = json.loads(text)
    return header


def _most_text(packed: int) -> int:
    """Return how long a header may be that is packed to so many bytes."""
    return min(_FREE + _RATIO * packed, _MOST_HEADER)


def _nested(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def is_too_nested(text: bytes) -> bool:
    """Tell whether a list of files or tensors has more brackets than `loads` takes.

    A tensor has three in at least 48 bytes, and a file fewer; names may have some more.
    """
    return _nested(text) > _MOST_NESTED + len(text) // 16


def loads(text: bytes) -> Any:
    """Parse a list of files or tensors, or raise ValueError if it would take too much memory."""
    if is_too_nested(text):
        raise ValueError(f"it has {_nested(text)} brackets in {len(text)} bytes")
    return json.loads(text)


def _parsed(header: dict[str, Any], rest: memoryview) -> Chunk:
    layout = NAMED[header["dtype"]]
    if header["code"] not in CHUNK_CODES:
        raise ValueError(f"unknown code {header['code']!r}")
    places, values, others = (whole(length) for length in header["streams"])
    streams = places + values + others
    if len(rest) != streams + _cpu.CODE_SLACK:
        raise ValueError(f"{len(rest)} bytes follow it instead of {streams + _cpu.CODE_SLACK}")
    ties, untied = header["ties"], header["untied"]
    if not all(isinstance(name, str) for name in [*ties, *ties.values(), *untied]):
        raise TypeError("names are text")
    if len(header["pieces"]) > MOST_PIECES:
        raise ValueError(f"{len(header['pieces'])} pieces")
    shard, shards = (whole(number, MOST_SHARDS + 1) for number in header["shard"])
    chunk = Chunk(
        base=Version.read(header["base"]),
        target=whole(header["target"]),
        shard=shard,
        shards=shards,
        part=whole(header["part"]),
        last=bool(header["last"]),
        code=header["code"],
        layout=layout,
        pieces=tuple(_piece_read(piece, layout) for piece in header["pieces"]),
        sum=whole(int(header["sum"], 16), 1 << 64),
        new=bool(header["new"]),
        limits=tuple(whole(limit, 256) for limit in header["limits"]),
        changes=tuple(whole(count) for count in header["changes"]),
        lengths=(places, values),
        ties=ties,
        untied=tuple(untied),
        streams=rest,
    )
    _check(chunk, streams)
    return chunk


def _check(chunk: Chunk, streams: int) -> None:
    if chunk.shard >= chunk.shards:
        raise ValueError(f"shard {chunk.shard} of {chunk.shards}")
    if chunk.elements > _MOST_ELEMENTS and chunk.code != "removed":
        raise ValueError(f"{chunk.elements} elements in a chunk")
    if chunk.new and chunk.code != "dense":
        raise ValueError(f"new tensors in code {chunk.code!r}")
    if chunk.limits and (chunk.code != "steps" or not chunk.layout.floats):
        raise ValueError(f"classes in code {chunk.code!r} of {chunk.layout.name}")
    for piece in chunk.pieces:
        if not piece.count and (piece.size or not (chunk.new or chunk.code == "removed")):
            raise ValueError(f"no elements of {shown(piece.name)}")
    if chunk.code in ("steps", "values"):
        if len(chunk.changes) != len(chunk.limits) + 1 or len(chunk.changes) > _cpu.MOST_CLASSES:
            raise ValueError(f"{len(chunk.changes)} classes with {len(chunk.limits)} limits")
        if list(chunk.limits) != sorted(set(chunk.limits), reverse=True):
            raise ValueError(f"limits {chunk.limits} do not fall")
        if chunk.changed > chunk.elements:
            raise ValueError(f"{chunk.changed} changes of {chunk.elements} elements")
    elif chunk.code == "dense" and streams != chunk.elements * chunk.layout.itemsize:
        raise ValueError(f"{streams} bytes for {chunk.elements} elements")


def whole(number: object, limit: int = 1 << 63) -> int:
    """Return a whole number below a limit, or raise ValueError."""
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < limit:
        raise ValueError(f"{number!r} is no whole number below {limit}")
    return number


def _described(piece: Piece) -> list[object]:
    whole = (piece.first, piece.count) == (0, piece.size)
    there = [] if whole else [piece.first, piece.row, piece.stride, piece.count]
    return [piece.name, list(piece.shape), *there]


def _piece_read(described: Sequence[Any], layout: Layout) -> Piece:
    name, lengths, *there = described
    if not isinstance(name, str):
        raise TypeError(f"{shown(repr(name))} is no name")
    shape = tuple(whole(length) for length in lengths)
    if len(shape) > MOST_DIMS:
        raise ValueError(f"{len(shape)} dimensions")
    whole(math.prod(length or 1 for length in shape))  # or torch could not make it
    piece = whole_piece(name, layout.dtype, shape)
    if not there:
        return piece
    first, row, stride, count = map(whole, there)
    if not (row >= 1 and stride >= 1 and (count <= row or stride >= row)):
        raise ValueError(f"rows of {row} elements every {stride}")
    last = first + max(count - 1, 0) // row * stride + max(count - 1, 0) % row
    if count and last >= piece.size:
        raise ValueError(f"element {last} of {piece.size} in {shown(name)}")
    return replace(piece, first=first, row=row, stride=stride, count=count)
