"""Versions as safetensors files: anchors, which are whole models, and deltas, which hold chunks.

The layout of safetensors is a length of eight bytes, a JSON header, and the tensors' bytes. Its
library takes all tensors at once, so files are written here; they are read in place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from sparcel.delta.bits import LAYOUTS
from sparcel.delta.chunk import Version
from sparcel.delta.parsing import is_too_nested, loads, malformed, whole
from sparcel.delta.parts import Part, parts_of, ties_of, untied
from sparcel.delta.pieces import CHUNK_BYTES, MOST_DIMS
from sparcel.errors import FormatError, InputError, few, shown
from sparcel.training.names import model_names

_NAMES = {layout.dtype: layout.safetensors for layout in LAYOUTS.values() if layout.safetensors}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MOST_HEADER = 100_000_000
_CHUNK = "chunk."
METADATA = "__metadata__"
"""The one name in a header that is not a tensor's."""


def check_storable(parts: Mapping[str, Part]) -> None:
    """Raise InputError unless there are tensors, and safetensors files can hold all of them."""
    if not parts:
        raise InputError("there are no tensors to publish; did a filter leave all names out?")
    for name, part in parts.items():
        is_text = name.encode(errors="ignore").decode() == name  # and has no halves of characters
        if name == METADATA or not is_text:
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


def delta_file(
    chunks: Sequence[bytes | memoryview], base: Version, version: Version
) -> Iterator[bytes | memoryview]:
    """Yield the parts of a file with the chunks of a delta."""
    names = {f"{_CHUNK}{i}": ("U8", [len(chunk)], len(chunk)) for i, chunk in enumerate(chunks)}
    yield _header(names, {"kind": "delta", **_told("base", base), **_told("version", version)})
    yield from chunks


def anchor_file(tensors: Mapping[str, Tensor], version: Version) -> Iterator[bytes | memoryview]:
    """Yield the parts of a file with whole tensors, by their own names; tied ones come once."""
    own = {plain: name for name, plain in model_names(tensors).items()}
    every = {own[name]: part for name, part in parts_of(tensors).items()}
    # Long elements first, so that all are aligned where the file is read in place.
    parts = dict(sorted(untied(every).items(), key=lambda one: -one[1].piece.dtype.itemsize))
    described = {}
    for name, part in parts.items():
        piece = part.piece
        described[name] = (_NAMES[piece.dtype], piece.shape, piece.count * piece.dtype.itemsize)
    ties = json.dumps(ties_of(every))
    checked = {"ties": ties, "ties_crc": f"{crc32(ties.encode()):08x}"}
    yield _header(described, {"kind": "anchor", **checked, **_told("version", version)})
    for part in parts.values():
        for piece in part.pieces(CHUNK_BYTES):
            yield part.gathered(piece).cpu().view(torch.uint8).numpy().data


class File:
    """A safetensors file, read in place.

    Raises
    ------
    FormatError
        If it is torn, or no safetensors file.
    """

    def __init__(self, data: bytes | memoryview, name: str) -> None:
        self._data = memoryview(data)
        self.name = name
        self._begin, self._tensors = self._read_header()
        metadata = self._tensors.pop(METADATA, {})
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        end = max((one["data_offsets"][1] for one in self._tensors.values()), default=0)
        if self._begin + end != len(self._data):
            raise FormatError(
                f"{name} is torn: it has {len(self._data)} bytes instead of {self._begin + end}"
            )

    @property
    def whole(self) -> bool:
        """Whether it holds tensors, and not chunks."""
        return self.metadata.get("kind") == "anchor"

    def chunks(self) -> list[memoryview]:
        """Return the chunks of a delta, in order."""
        names = [f"{_CHUNK}{i}" for i in range(len(self._tensors))]
        if set(names) != set(self._tensors):
            raise FormatError(f"{self.name} is no delta: it holds {few(sorted(self._tensors))}")
        return [self._bytes(name) for name in names]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of an anchor, in the memory of the file; tied ones are one tensor."""
        tensors = {name: self._tensor(name) for name in self._tensors}
        with malformed(f"{self.name} has wrong ties"):
            ties = self.metadata["ties"]
            if int(self.metadata["ties_crc"], 16) != crc32(ties.encode()):
                raise ValueError("their checksum does not match")
            tensors |= {alias: tensors[name] for alias, name in loads(ties.encode()).items()}
        return tensors

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
                if name != METADATA:
                    _check(one)
        return 8 + length, header

    def _bytes(self, name: str) -> memoryview:
        begin, end = self._tensors[name]["data_offsets"]
        return self._data[self._begin + begin : self._begin + end]

    def _tensor(self, name: str) -> Tensor:
        told = self._tensors[name]
        dtype, shape = _DTYPES[told["dtype"]], told["shape"]
        data = self._bytes(name)
        if not len(data):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


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


def _header(
    tensors: Mapping[str, tuple[str, Iterable[int], int]], metadata: Mapping[str, str]
) -> bytes:
    header: dict[str, object] = {METADATA: {"format": "pt", **metadata}}
    begin = 0
    for name, (dtype, shape, size) in tensors.items():
        offsets = [begin, begin + size]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        begin += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER or is_too_nested(text):
        raise InputError(
            f"the names of {len(tensors)} tensors take {len(text)} bytes in a safetensors file,"
            f" which holds at most {_MOST_HEADER} and few brackets; shorten them"
        )
    return len(text).to_bytes(8, "little") + text
