"""Versions as safetensors files: anchors, which are whole models, and deltas, which hold chunks.

The layout of safetensors is a length of eight bytes, a JSON header, and the tensors' bytes. Its
library takes all tensors at once, so files are written here; they are read in place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from sparcel.core._threads import in_order, in_pool
from sparcel.core.training.driver import model_names
from sparcel.errors import FormatError, InputError, few, shown
from sparcel.products.delta.chunk import Chunk, Version
from sparcel.products.delta.elements import CHUNK_BYTES, LAYOUTS, MOST_DIMS, Piece, whole_piece
from sparcel.products.delta.header import is_too_nested, loads, malformed, whole
from sparcel.products.delta.parts import Part, parts_of, sum_of_piece, ties_of, untied
from sparcel.products.stores import Ranged

_NAMES = {layout.dtype: layout.safetensors for layout in LAYOUTS.values() if layout.safetensors}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MOST_HEADER = 100_000_000
_READS = 8
"""How many reads of a file are on the way at a time."""

NOTHING_TO_PUBLISH = "there are no tensors to publish; did a filter leave all names out?"
_METADATA = "__metadata__"
"""The one name in a header that is not a tensor's."""

_CHUNK = re.compile(
    r"chunk\.(\d{1,9})(?:\.(\d{1,19})-(\d{1,19})\.([\dx]*)\.(.*))?", re.ASCII | re.DOTALL
)
"""How files name chunks: by their number, and maybe by which elements of which tensor they tell."""

_NEAR = 1 << 16
"""Bytes that are read with what is before and after them, rather than asking once more."""

_MOST_READ = 32 << 20
"""Most bytes that are read at once for several spans."""


def check_storable(parts: Mapping[str, Part]) -> None:
    """Raise InputError unless safetensors files can hold all tensors."""
    for name, part in parts.items():
        is_text = name.encode(errors="ignore").decode() == name  # and has no halves of characters
        if name == _METADATA or not is_text:
            why = "keep for themselves" if is_text else "cannot encode"
            raise InputError(
                f"'{shown(name)}' is a name that safetensors files {why}; publish the tensor under"
                " another"
            )
        if part.piece.dtype not in _NAMES:
            raise InputError(
                f"{shown(name)} is of {part.piece.dtype}, for which safetensors has no name; view"
                " it as another dtype"
            )


@dataclass(frozen=True)
class Listed:
    """A chunk, as a file lists it.

    Attributes
    ----------
    key
        Its name in the file.
    number
        Its number.
    name, shape
        The tensor that it tells of; no name if it may tell of any.
    first, end
        Between these are the elements that it tells of.
    """

    key: str
    number: int
    name: str | None = None
    shape: tuple[int, ...] = ()
    first: int = 0
    end: int = 0

    @classmethod
    def of(cls, number: int, pieces: Sequence[Piece]) -> Listed:
        """List a chunk, which tells of these pieces."""
        if len({piece.name for piece in pieces}) != 1:
            return cls(f"chunk.{number}", number)
        name, shape = pieces[0].name, pieces[0].shape
        first, end = min(one.first for one in pieces), max(one.end for one in pieces)
        key = f"chunk.{number}.{first}-{end}.{'x'.join(map(str, shape))}.{name}"
        return cls(key, number, name, shape, first, end)

    @classmethod
    def read(cls, key: str) -> Listed:
        """Return what a name tells, or raise ValueError."""
        match = _CHUNK.fullmatch(key)
        if match is None:
            raise ValueError(f"{shown(key)} is no chunk")
        number, first, end, shape, name = match.groups(default="")
        if match[5] is None:
            return cls(key, int(number))
        lengths = tuple(int(length) for length in shape.split("x") if length)
        return cls(key, int(number), name, lengths, int(first), int(end))


def delta_file(
    chunks: Iterable[bytes | memoryview],
    base: Version,
    version: Version,
    listed: Sequence[Chunk] = (),
    sizes: Sequence[int] = (),
) -> Iterator[bytes | memoryview]:
    """Yield the parts of a file with the chunks of a delta.

    Parameters
    ----------
    chunks
        A list; or chunks that are made as they are written, with their ``sizes`` in bytes.
    base, version
        What it applies to, and what it makes.
    listed
        The same chunks, if the header is to list what tensors they tell of.
    """
    if not sizes:
        chunks = list(chunks)
        sizes = [len(one) for one in chunks]
    pieces = [chunk.pieces for chunk in listed] or [()] * len(sizes)
    keys = [Listed.of(number, some).key for number, some in enumerate(pieces)]
    names = {key: ("U8", [size], size) for key, size in zip(keys, sizes, strict=True)}
    told = {"kind": "delta", **_told("base", base), **_told("version", version)}
    yield _header(names, told, bool(listed))
    yield from chunks


def anchor_file(
    tensors: Mapping[str, Tensor], version: Version, for_store: bool = False
) -> Iterator[bytes | memoryview]:
    """Yield the parts of a file with whole tensors, by their own names.

    Tied tensors come under each of their names: other libraries do not know the ties that the file
    tells, and some load one name only.

    Parameters
    ----------
    tensors
        What it is to hold.
    version
        What they are.
    for_store
        Whether tied tensors come once, and the file tells the sum of each block of 4 MiB, so that a
        reader of some blocks can check these.
    """
    own = {plain: name for name, plain in model_names(tensors).items()}
    every = {own[name]: part for name, part in parts_of(tensors).items()}
    # Long elements first, so that all are aligned where the file is read in place.
    held = untied(every) if for_store else every
    parts = dict(sorted(held.items(), key=lambda one: -one[1].piece.dtype.itemsize))
    described = {}
    for name, part in parts.items():
        piece = part.piece
        described[name] = (_NAMES[piece.dtype], part.local.shape, part.local.nbytes)
    ties = json.dumps(ties_of(every))
    told = {"ties": ties, "ties_crc": f"{crc32(ties.encode()):08x}"}
    blocks = [(part, piece) for part in parts.values() for piece in part.piece.cuts(CHUNK_BYTES)]
    if for_store:
        sums = in_order(lambda block: sum_of_piece(*block), blocks)
        told["sums"] = "".join(f"{one:016x}" for one in sums)
    yield _header(described, {"kind": "anchor", **told, **_told("version", version)}, for_store)
    for part, piece in blocks:
        yield part.gathered(piece).cpu().view(torch.uint8).numpy().data


class File:
    """A safetensors file, read in place.

    Raises
    ------
    FormatError
        If it is torn, or no safetensors file.
    """

    def __init__(self, data: bytes | memoryview | Ranged, name: str) -> None:
        self._data = data if isinstance(data, Ranged) else memoryview(data)
        self.name = name
        self._begin, self._tensors = self._read_header()
        metadata = self._tensors.pop(_METADATA, {})
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        end = max((one["data_offsets"][1] for one in self._tensors.values()), default=0)
        if self._begin + end != len(self._data):
            raise FormatError(
                f"{name} is torn: it has {len(self._data)} bytes instead of {self._begin + end}"
            )

    @property
    def taken(self) -> int:
        """How many bytes were read of it."""
        return self._data.bytes if isinstance(self._data, Ranged) else len(self._data)

    @property
    def whole(self) -> bool:
        """Whether it holds tensors, and not chunks."""
        return self.metadata.get("kind") == "anchor"

    def chunks(self) -> list[memoryview]:
        """Return the chunks of a delta, in order."""
        return [self._data[slice(*self._span(one.key))] for one in self.listed()]

    def listed(self) -> list[Listed]:
        """Return what the header lists of each chunk of a delta, in order."""
        with malformed(f"{self.name} is no delta"):
            listed = sorted(map(Listed.read, self._tensors), key=lambda one: one.number)
            if not listed or [one.number for one in listed] != list(range(len(listed))):
                raise ValueError(f"it holds {few(sorted(self._tensors))}")
        if any(one.name is not None for one in listed):
            self._check_listed()
        return listed

    def _check_listed(self) -> None:
        """Check what the header lists by its checksum."""
        with malformed(f"{self.name} has a wrong header"):
            if self.metadata["listed_crc"] != _crc_of(self._tensors):
                raise ValueError("the checksum of what it lists does not match")

    def some(self, listed: Iterable[Listed]) -> Iterator[memoryview]:
        """Yield chunks in order; those near one another are read at once, some reads ahead."""
        runs = list(_near(self._span(one.key) for one in listed))
        read = in_pool(lambda run: self._data[run[0][0] : run[-1][1]], runs, _READS)
        for run, data in zip(runs, read, strict=True):
            first = run[0][0]
            yield from (data[begin - first : end - first] for begin, end in run)

    def block_sums(self, version: Version) -> dict[str, list[int]]:
        """Return the sums of the blocks of each tensor of an anchor, which make up a version's."""
        self._check_listed()
        with malformed(f"{self.name} has wrong sums"):
            text = self.metadata["sums"]
            sums = [int(text[at : at + 16], 16) for at in range(0, len(text), 16)]
            if (sum(sums) - version.sum) % (1 << 64):
                raise ValueError(f"they do not make version {version}")
            found, at = {}, 0
            for name in self._tensors:
                blocks = sum(1 for _ in self.piece(name).cuts(CHUNK_BYTES))
                found[name] = sums[at : at + blocks]
                at += blocks
            if at != len(sums):
                raise ValueError(f"{len(sums)} sums for {at} blocks")
        return found

    def piece(self, name: str) -> Piece:
        """Return a whole tensor of an anchor as a piece."""
        told = self._tensors[name]
        return whole_piece(name, _DTYPES[told["dtype"]], tuple(told["shape"]))

    def elements(self, name: str, begin: int, end: int) -> Tensor:
        """Return elements of a tensor of an anchor, from one to before another one."""
        dtype, first = self.piece(name).dtype, self._span(name)[0]
        if begin == end:
            return torch.empty(0, dtype=dtype)
        data = self._data[first + begin * dtype.itemsize : first + end * dtype.itemsize]
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype)

    def ties(self) -> dict[str, str]:
        """Return for each tensor of an anchor that is tied to another the name of that one."""
        with malformed(f"{self.name} has wrong ties"):
            ties = self.metadata["ties"]
            if int(self.metadata["ties_crc"], 16) != crc32(ties.encode()):
                raise ValueError("their checksum does not match")
            told: dict[str, str] = loads(ties.encode())
            if not self._tensors.keys() >= set(told.values()):
                raise ValueError("they name other tensors")
        return told

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of an anchor, in the memory of the file; tied ones are one tensor."""
        tensors = {name: self._tensor(name) for name in self._tensors}
        return tensors | {alias: tensors[name] for alias, name in self.ties().items()}

    def copies(self) -> dict[str, Tensor]:
        """Return the tied tensors of an anchor that it also holds apart, for other libraries."""
        return {alias: self._tensor(alias) for alias in self.ties() if alias in self._tensors}

    def _tensor(self, name: str) -> Tensor:
        whole = self.piece(name)
        return self.elements(name, 0, whole.size).view(whole.shape)

    def version(self, which: str = "version") -> Version:
        """Return the version that the file makes, or its ``base``."""
        with malformed(f"{self.name} does not tell its {which}"):
            return Version.read((int(self.metadata[which]), self.metadata[f"{which}_sum"]))

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        length = int.from_bytes(self._data[:8], "little")
        if len(self._data) < 8 or length > min(_MOST_HEADER, len(self._data) - 8):
            raise FormatError(f"{self.name} is torn, or no safetensors file")
        with malformed(f"{self.name} has a wrong header"):
            header = loads(bytes(self._data[8 : 8 + length]))
            for name, one in header.items():
                if name != _METADATA:
                    _check(one)
        return 8 + length, header

    def _span(self, name: str) -> tuple[int, int]:
        begin, end = self._tensors[name]["data_offsets"]
        return self._begin + begin, self._begin + end


def _check(told: dict[str, Any]) -> None:
    (begin, end), shape = told["data_offsets"], told["shape"]
    if len(shape) > MOST_DIMS:
        raise ValueError(f"{len(shape)} dimensions")
    whole(math.prod(whole(n) or 1 for n in shape))  # or torch could not make it
    size = math.prod(shape) * _DTYPES[told["dtype"]].itemsize
    if whole(end) - whole(begin) != size:
        raise ValueError(f"{size} bytes at {begin} to {end}")


def _told(what: str, version: Version) -> dict[str, str]:
    number, total = version.stated()
    return {what: str(number), f"{what}_sum": total}


def _crc_of(listed: Mapping[str, object]) -> str:
    """Return a checksum of what a header lists."""
    return f"{crc32(json.dumps(listed).encode()):08x}"


def _header(
    tensors: Mapping[str, tuple[str, Iterable[int], int]],
    metadata: Mapping[str, str],
    checked: bool,
) -> bytes:
    """Return a header, with a checksum of what it lists if that is to be checked."""
    listed: dict[str, object] = {}
    begin = 0
    for name, (dtype, shape, size) in tensors.items():
        offsets = [begin, begin + size]
        listed[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        begin += size
    crc = {"listed_crc": _crc_of(listed)} if checked else {}
    header = {_METADATA: {"format": "pt", **metadata, **crc}, **listed}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER or is_too_nested(text):
        raise InputError(
            f"the names of {len(tensors)} tensors take {len(text)} bytes in a safetensors file,"
            f" which holds at most {_MOST_HEADER} and few brackets; shorten them"
        )
    return len(text).to_bytes(8, "little") + text


def _near(spans: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield spans of a file that are best read at once, because little is between them."""
    run: list[tuple[int, int]] = []
    for begin, end in spans:
        if run and not (0 <= begin - run[-1][1] <= _NEAR and end - run[0][0] <= _MOST_READ):
            yield run
            run = []
        run.append((begin, end))
    if run:
        yield run
