"""The layout of a chunk, which is documented in ``docs/reference/deltas-layout.md``."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparcel import _cpu
from sparcel.errors import FormatError, shown
from sparcel.products.delta import header as headers
from sparcel.products.delta.elements import CHUNK_BYTES, NAMED, Layout, Piece
from sparcel.products.delta.header import malformed, whole

_START = struct.Struct("<4sIIQQ")
"""How a chunk begins: what it is, the length of its header, the checksum of what follows that, and
the sums of its base and of its changes. After these come its streams, then its header."""
_CHECKED = 12
"""Where that begins which the checksum is of."""
_MAGIC = b"SPD2"
MOST_SHARDS = (1 << 20) - 1
MOST_NUMBER = (1 << 63) - 1
"""The largest number of a version."""
MOST_ELEMENTS = 1 << 25
CHUNK_CODES = ("steps", "nibbles", "values", "dense", "xor", "removed")
"""What a chunk may hold: a step in units in the last place of each element, or of each nibble, that
changed; the new value of each changed element; the new values of all elements; the XOR of all old
and new values, packed; or nothing, because the tensor is gone."""


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


NOTHING = Version(0, 0)
"""The version without tensors, which is the base of whole models in chunks."""


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
    nibbles
        How many nibbles change, where these are told.
    shift
        How many of the last bits of all changed elements are 0, before and after: steps leave them
        out.
    sum
        What the changes add to the sum of the version.
    ties
        In the last chunk: the tensors that are tied in the new version, and to which ones. Only
        these count in sums.
    untied
        In the last chunk: those that were tied in the base, and are not any more.
    streams
        The coded places, the coded values, and the plain bits of both; or all elements, as the last
        one. Of a chunk that was read, at least `_cpu.CODE_SLACK` bytes follow them.
    lengths
        Of the three streams, in bytes.
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
    nibbles: int = 0
    shift: int = 0
    lengths: tuple[int, int, int] = (0, 0, 0)
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
        header = headers.packed(
            {
                "target": self.target,
                "base": self.base.number,
                "part": self.part,
                "changes": self.changes,
                "streams": self.lengths,
                "code": self.code,
                "dtype": self.layout.name,
                **headers.description_of(self.pieces),
                "limits": self.limits,
                "shift": self.shift,
                "nibbles": self.nibbles,
                "new": self.new,
                "shard": [self.shard, self.shards],
                "last": self.last,
                "ties": dict(self.ties),
                "untied": self.untied,
            }
        ).ljust(_cpu.CODE_SLACK, b"\0")
        start = bytearray(_START.pack(_MAGIC, len(header), 0, self.base.sum, self.sum))
        streams = memoryview(self.streams)[: sum(self.lengths)]
        crc = zlib.crc32(header, zlib.crc32(streams, zlib.crc32(start[_CHECKED:])))
        _START.pack_into(start, 0, _MAGIC, len(header), crc, self.base.sum, self.sum)
        return b"".join([start, streams, header])


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
    magic, length, crc, base, total = _START.unpack_from(view)
    if magic != _MAGIC:
        raise FormatError(f"a chunk begins with {_MAGIC!r}, got {bytes(magic)!r}")
    if zlib.crc32(view[_CHECKED:]) != crc:
        raise FormatError("a chunk is torn or corrupt: its checksum does not match")
    with malformed("a chunk's header is wrong"):
        if not _cpu.CODE_SLACK <= length <= len(view) - _START.size:
            raise ValueError(f"it has {length} bytes")
        header = headers.unpacked(view[len(view) - length :])
        chunk = _parsed(header, (base, total), view[_START.size :], length)
        _check(chunk)
        return chunk


def _parsed(header: dict[str, Any], sums: tuple[int, int], rest: memoryview, slack: int) -> Chunk:
    """Return the chunk of a header, and of what has its streams and then ``slack`` bytes."""
    layout = NAMED[header["dtype"]]
    if header["code"] not in CHUNK_CODES:
        raise ValueError(f"unknown code {header['code']!r}")
    places, values, others = (whole(length) for length in header["streams"])
    if len(rest) != places + values + others + slack:
        raise ValueError(
            f"{len(rest) - slack} bytes of streams instead of {places + values + others}"
        )
    ties, untied = header["ties"], header["untied"]
    texts = [*ties, *ties.values(), *untied]
    if not isinstance(untied, list) or not all(isinstance(name, str) for name in texts):
        raise TypeError("names are text, and come in a list")
    shard, shards = (whole(number, MOST_SHARDS + 1) for number in header["shard"])
    return Chunk(
        base=Version(whole(header["base"]), sums[0]),
        target=whole(header["target"]),
        shard=shard,
        shards=shards,
        part=whole(header["part"]),
        last=bool(header["last"]),
        code=header["code"],
        layout=layout,
        pieces=tuple(headers.pieces_of(header, layout)),
        sum=sums[1],
        new=bool(header["new"]),
        shift=whole(header["shift"], 8 * layout.itemsize),
        nibbles=whole(header["nibbles"]),
        limits=tuple(whole(limit, 256) for limit in header["limits"]),
        changes=tuple(whole(count) for count in header["changes"]),
        lengths=(places, values, others),
        ties=ties,
        untied=tuple(untied),
        streams=rest,
    )


def _check(chunk: Chunk) -> None:
    if chunk.shard >= chunk.shards:
        raise ValueError(f"shard {chunk.shard} of {chunk.shards}")
    if chunk.elements > MOST_ELEMENTS and chunk.code != "removed":
        raise ValueError(f"{chunk.elements} elements in a chunk")
    if chunk.new and chunk.code != "dense":
        raise ValueError(f"new tensors in code {chunk.code!r}")
    if chunk.limits and (chunk.code != "steps" or not chunk.layout.floats):
        raise ValueError(f"classes in code {chunk.code!r} of {chunk.layout.name}")
    for piece in chunk.pieces:
        if not piece.count and (piece.size or not (chunk.new or chunk.code == "removed")):
            raise ValueError(f"no elements of {shown(piece.name)}")
    if chunk.shift and chunk.code != "steps":
        raise ValueError(f"a shift in code {chunk.code!r}")
    size = chunk.elements * chunk.layout.itemsize
    if chunk.nibbles > (2 * size if chunk.code == "nibbles" else 0):
        raise ValueError(f"{chunk.nibbles} nibbles change in {size} bytes")
    if chunk.changed > chunk.elements:
        raise ValueError(f"{chunk.changed} changes of {chunk.elements} elements")
    if chunk.code in ("dense", "xor", "removed"):
        _check_plain(chunk, size)
        return
    if len(chunk.changes) != len(chunk.limits) + 1 or len(chunk.changes) > _cpu.MOST_CLASSES:
        raise ValueError(f"{len(chunk.changes)} classes with {len(chunk.limits)} limits")
    if list(chunk.limits) != sorted(set(chunk.limits), reverse=True):
        raise ValueError(f"limits {chunk.limits} do not fall")


def _check_plain(chunk: Chunk, size: int) -> None:
    """Check a chunk without symbols, whose elements have ``size`` bytes."""
    length = {"dense": size, "removed": 0}.get(chunk.code, chunk.lengths[2])
    if chunk.lengths != (0, 0, length):
        raise ValueError(f"{chunk.lengths} bytes of streams for {size} of elements")
    if len(chunk.changes) != (chunk.code == "xor"):
        raise ValueError(f"changes {chunk.changes} in code {chunk.code!r}")
    if chunk.code == "xor" and size > CHUNK_BYTES:
        raise ValueError(f"XOR of {size} bytes")
