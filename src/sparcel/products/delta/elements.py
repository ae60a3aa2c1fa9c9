"""Elements of tensors: their bits, sums that tell versions apart, and pieces, which chunks have."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from types import EllipsisType
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparcel.errors import InputError, shown

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Layout:
    """What a dtype's bits mean.

    Attributes
    ----------
    dtype, name
        The dtype, and its name in ``torch``.
    safetensors
        Its name in safetensors files, or None: then it cannot be in a store.
    floats, fraction
        Whether elements are floats, and of these, how many bits follow the exponent.
    itemsize, integers
        Bytes of an element, and the dtype of integers as wide.
    """

    dtype: torch.dtype
    name: str
    safetensors: str | None
    floats: bool
    fraction: int
    itemsize: int
    integers: torch.dtype

    @property
    def coded(self) -> tuple[int, bool, int]:
        """What the compiled coder must know of it."""
        return self.itemsize, self.floats, self.fraction


def _layout(dtype: torch.dtype, safetensors: str | None, fraction: int = 0) -> Layout:
    name, size = str(dtype).removeprefix("torch."), dtype.itemsize
    return Layout(dtype, name, safetensors, fraction > 0, fraction, size, _INTEGERS[size])


LAYOUTS = {
    layout.dtype: layout
    for layout in (
        _layout(torch.float64, "F64", 52),
        _layout(torch.float32, "F32", 23),
        _layout(torch.float16, "F16", 10),
        _layout(torch.bfloat16, "BF16", 7),
        _layout(torch.float8_e4m3fn, "F8_E4M3", 3),
        _layout(torch.float8_e4m3fnuz, "F8_E4M3FNUZ", 3),
        _layout(torch.float8_e5m2, "F8_E5M2", 2),
        _layout(torch.float8_e5m2fnuz, "F8_E5M2FNUZ", 2),
        _layout(torch.float8_e8m0fnu, "F8_E8M0"),
        _layout(torch.complex32, None),
        _layout(torch.complex64, "C64"),
        _layout(torch.bool, "BOOL"),
        _layout(torch.uint8, "U8"),
        _layout(torch.int8, "I8"),
        _layout(torch.uint16, "U16"),
        _layout(torch.int16, "I16"),
        _layout(torch.uint32, "U32"),
        _layout(torch.int32, "I32"),
        _layout(torch.uint64, "U64"),
        _layout(torch.int64, "I64"),
    )
}
"""All dtypes that deltas know; others, such as quantized ones, torch cannot read as their bits."""

NAMED = {layout.name: layout for layout in LAYOUTS.values()}
"""The same by their names in torch, which chunks state."""


def layout_of(dtype: torch.dtype) -> Layout:
    """Return the layout of a dtype, or raise InputError."""
    layout = LAYOUTS.get(dtype)
    if layout is None:
        raise InputError(f"deltas do not know {dtype}")
    return layout


def bits_of(elements: Tensor) -> Tensor:
    """Return a tensor's bits as integers, in the same memory."""
    return elements.detach().view(layout_of(elements.dtype).integers)


def planes_of(words: Tensor) -> bytes:
    """Return the lowest bytes of all integers, the next ones of all, and so on."""
    return words.view(torch.uint8).view(len(words), -1).T.contiguous().numpy().tobytes()


def from_planes(planes: bytes, integers: torch.dtype) -> Tensor:
    """Return the integers whose bytes `planes_of` has told."""
    octets = torch.frombuffer(bytearray(planes), dtype=torch.uint8)
    return octets.view(integers.itemsize, -1).T.contiguous().view(integers).view(-1)


@lru_cache(1 << 14)
def key_of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the number (64 bits) that stands for a tensor in sums."""
    what = repr((name, str(dtype), tuple(shape))).encode()
    return int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little")


def stepped(before: Tensor, steps: Tensor, floats: bool, shift: int = 0) -> Tensor:
    """Return the bits, as integers, that lie so many units in the last place from others.

    Floats are counted in the order of their values, in which −0 comes right before 0. The last
    ``shift`` bits of all values are 0, and do not count.
    """
    if not floats:
        return before + (steps << shift)
    return _reordered((_reordered(before) >> shift) + steps << shift) >> shift << shift


def _reordered(bits: Tensor) -> Tensor:
    """Map bits of floats, read as signed integers, to numbers in the floats' order, or back."""
    lowest = torch.iinfo(bits.dtype).min
    return torch.where(bits < 0, ~bits + lowest, bits)


def hashed(key: int, numbers: Tensor, bits: Tensor) -> int:
    """Return the sum, modulo 2⁶⁴, of what elements with these numbers and bits add to a tensor's.

    It runs on any device; the compiled kernel `_cpu.delta_sum` says the same of whole tensors.
    Source: SplitMix64's finaliser; Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators".
    """
    mask = (1 << 8 * bits.itemsize) - 1
    plain = bits.long() & mask if mask < (1 << 64) - 1 else bits.long()
    x = numbers.long() * signed(0x9E3779B97F4A7C15) + plain * signed(0xD1342543DE82EF95)
    x = x + signed(key)
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return int((x ^ _shifted(x, 31)).sum()) % (1 << 64)


def signed(number: int) -> int:
    """Return the number of 64 bits with a sign that has the bits of a number without one."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right as if numbers had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


CHUNK_BYTES = 4 << 20
"""Most bytes of weights in a chunk of many changes: these wait in memory."""

MOST_PIECES = 1 << 12
"""Most pieces in a chunk: each one is described in its header."""

MOST_DIMS = 64
"""Most dimensions of a tensor, as in torch."""

Index: TypeAlias = EllipsisType | slice | tuple[slice, ...]
"""What a reader has of a tensor: ``...`` for all of it, or slices of its first dimensions."""

Only: TypeAlias = Mapping[str, Index]


@dataclass(frozen=True)
class Piece:
    """Elements of the tensor ``name`` of a dtype and shape: ``count`` of them in rows.

    Element i of a piece has the number ``first + i // row * stride + i % row`` in the whole tensor,
    read row by row. So a piece may be any range of a tensor, or of a shard that is cut along one
    dimension.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    row: int
    stride: int
    count: int

    @property
    def key(self) -> int:
        """The number that stands for the tensor in sums."""
        return key_of(self.name, self.dtype, self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def ranges(self) -> bool:
        """Whether its numbers have no gaps."""
        return self.row == self.stride or self.count <= self.row

    @property
    def end(self) -> int:
        """The number after its last element's, or ``first`` without any."""
        rows, rest = divmod(self.count - 1, self.row)
        return self.first + (rows * self.stride + rest + 1 if self.count else 0)

    def meets(self, other: Piece) -> bool:
        """Tell whether elements of both may be the same: they lie in the same range of a tensor."""
        apart = self.end <= other.first or other.end <= self.first
        return self.name == other.name and bool(self.count and other.count) and not apart

    @property
    def total(self) -> int:
        """The sum of its elements' numbers."""
        rows, rest = divmod(self.count, self.row)
        starts = self.stride * (self.row * (rows * (rows - 1) // 2) + rest * rows)
        within = rows * (self.row * (self.row - 1) // 2) + rest * (rest - 1) // 2
        return self.first * self.count + starts + within

    def made_of(self, pieces: Iterable[Piece]) -> bool:
        """Tell whether pieces of its tensor together have each element once.

        Their numbers must add up, too: a gap may be as long as what is there twice.
        """
        count = total = 0
        for piece in pieces:
            count, total = count + piece.count, total + piece.total
        return (count, total) == (self.size, self.size * (self.size - 1) // 2)

    def numbers(self, places: Tensor | None = None) -> Tensor:
        """Return the numbers in the whole tensor (int64) of elements of this piece, or of all."""
        places = torch.arange(self.count) if places is None else places.long()
        if self.ranges:
            return places + self.first
        return self.first + places // self.row * self.stride + places % self.row

    def cut(self, begin: int, end: int) -> Piece:
        """Return elements from ``begin`` to ``end``: whole rows, or a part of one, or a range."""
        if self.ranges:
            return replace(self, first=self.first + begin, count=end - begin)
        first = self.first + begin // self.row * self.stride
        if begin % self.row or (end % self.row and end != self.count):
            return replace(self, first=first + begin % self.row, row=end - begin, count=end - begin)
        return replace(self, first=first, count=end - begin)

    def cuts(self, nbytes: int) -> Iterator[Piece]:
        """Cut it into pieces of at most so many bytes; that of an empty tensor is one, too.

        They have whole rows, if one has no more bytes.
        """
        most = nbytes // self.dtype.itemsize
        if self.count <= most:
            if self.count or not self.size:
                yield self
            return
        row = math.prod(self.shape[1:]) if self.ranges else self.row
        if row and (not self.ranges or self.first % row == 0):
            most = most // row * row or most
        begin = 0
        while begin < self.count:
            end = min(begin + most, self.count)
            if not self.ranges and most < self.row:
                end = min(end, (begin // self.row + 1) * self.row)
            yield self.cut(begin, end)
            begin = end


def whole_piece(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Piece:
    """Return all elements of a tensor as a piece."""
    size = math.prod(shape)
    return Piece(name, dtype, shape, 0, max(size, 1), max(size, 1), size)


def piece_of_shard(name: str, tensor: DTensor) -> Piece:
    """Return what this process holds of a tensor as a piece.

    Raises
    ------
    InputError
        If that is a sum which is not yet made, or no slice of the whole.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(how.is_partial() for how in tensor.placements):
        raise InputError(
            f"{shown(name)} is placed as {tensor.placements}, a sum that is not yet made"
        )
    if tensor.device_mesh.get_coordinate() is None:
        return Piece(name, tensor.dtype, tuple(tensor.shape), 0, 1, 1, 0)

    held, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tuple(tensor.to_local().shape)
    is_empty = math.prod(local) == math.prod(held) == 0  # FSDP2 cuts these to other shapes
    if (local != tuple(held) and not is_empty) or _is_interleaved(tensor):
        raise InputError(
            f"{shown(name)} holds {list(local)} here, which is no slice of the whole as"
            f" {tensor.placements} cut it; make it by distribute_tensor, or redistribute it"
        )
    return piece_of_slice(name, tensor.dtype, tuple(tensor.shape), tuple(starts), tuple(held))


def _is_interleaved(tensor: DTensor) -> bool:
    """Tell whether a shard has gaps: it leaves room for a cut that no other dimension makes."""
    from torch.distributed.tensor.placement_types import _StridedShard

    cuts = list(zip(tensor.device_mesh.shape, tensor.placements, strict=True))
    for number, (_, how) in enumerate(cuts):
        if isinstance(how, _StridedShard):
            later = [size for size, other in cuts[number + 1 :] if other.is_shard(how.dim)]
            if how.split_factor != math.prod(later):
                return True
    return False


def piece_of_slice(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
) -> Piece:
    """Return a slice of a tensor as a piece: from ``starts``, ``lengths`` along each dimension.

    Raises
    ------
    InputError
        If the slice's rows have no common distance.
    """
    count = math.prod(lengths)
    inner = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first = sum(start * size for start, size in zip(starts, inner, strict=True))
    cut = [d for d, (part, all_) in enumerate(zip(lengths, shape, strict=True)) if part < all_]
    last = cut[-1] if cut else 0
    outer = [d for d in range(last) if lengths[d] > 1]
    if not count or not cut or not outer:
        row = max(count, 1)
        return Piece(name, dtype, shape, first, row, row, count)
    if any(inner[a] != lengths[b] * inner[b] for a, b in pairwise(outer)):
        raise InputError(
            f"{shown(name)} is cut along several dimensions, {lengths} of {shape}; publish it from"
            " a mesh that cuts it along one, or gather it first"
        )
    row = lengths[last] * inner[last]
    stride = inner[outer[-1]]
    return Piece(name, dtype, shape, first, row, stride, count)
