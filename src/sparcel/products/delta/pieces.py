"""Pieces of tensors, which chunks are made of, and slices of them, which readers have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import EllipsisType
from typing import SupportsIndex, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparcel.errors import InputError, shown
from sparcel.products.delta.bits import key_of

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


def checked_only(only: Only) -> dict[str, Index]:
    """Return a copy of what a reader has, or raise InputError."""
    if not isinstance(only, Mapping) or not only:
        raise InputError(
            "only= tells by name what is served of each tensor: all of it, which is ..., a slice of"
            " its rows, or a tuple of slices"
        )
    for name, index in only.items():
        for one in _slices(index):
            if not isinstance(one, slice) or not _is_plain(one):
                raise InputError(
                    f"only= has {shown(repr(index))} for {shown(str(name))}; it takes ..., a slice"
                    " without a step, or a tuple of these slices"
                )
    return dict(only)


def _is_plain(one: slice) -> bool:
    """Tell whether a slice has whole numbers as bounds, and no step."""
    bounds = (one.start, one.stop)
    return one.step in (None, 1) and all(
        bound is None or isinstance(bound, SupportsIndex) for bound in bounds
    )


def _slices(index: Index) -> tuple[slice, ...]:
    if index is ...:
        return ()
    return index if isinstance(index, tuple) else (index,)


@dataclass(frozen=True)
class Slice:
    """Where a slice begins, and how long it is, along each dimension of a tensor."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, index: Index, name: str, shape: tuple[int, ...]) -> Slice:
        """Return what an index has of a tensor, by torch's rules."""
        cuts = _slices(index)
        if len(cuts) > len(shape):
            raise InputError(f"only= has {len(cuts)} slices for {shown(name)}, of {list(shape)}")
        cuts += (slice(None),) * (len(shape) - len(cuts))
        bounds = [cut.indices(size)[:2] for cut, size in zip(cuts, shape, strict=True)]
        return cls(tuple(a for a, _ in bounds), tuple(max(b - a, 0) for a, b in bounds))

    def piece(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Piece:
        """Return it as a piece, or raise InputError if it is cut along too many dimensions."""
        try:
            return piece_of_slice(name, dtype, shape, self.starts, self.lengths)
        except InputError:
            raise InputError(
                f"only= cuts {shown(name)} along several dimensions, {self.lengths} of {shape}; ask"
                " for all of it along one"
            ) from None

    def rows(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return which elements the rows have that it is of: the first, and the one after them."""
        row = math.prod(shape[1:])
        first, count = (self.starts[0], self.lengths[0]) if shape else (0, 1)
        return first * row, (first + count) * row

    def of_rows(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return it in memory of its own, out of the elements of its rows."""
        held = rows.view(self.lengths[:1] + shape[1:])
        for dim in range(1, len(shape)):
            held = held.narrow(dim, self.starts[dim], self.lengths[dim])
        return held.clone(memory_format=torch.contiguous_format)
