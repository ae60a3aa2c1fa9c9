"""Slices of tensors, as a reader has them that serves a part of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import EllipsisType
from typing import SupportsIndex, TypeAlias

import torch
from torch import Tensor

from sparcel.delta.pieces import Piece, piece_of_slice, whole_piece
from sparcel.errors import InputError, shown

Index: TypeAlias = EllipsisType | slice | tuple[slice, ...]
"""What a reader has of a tensor: ``...`` for all of it, or slices of its first dimensions."""

Only: TypeAlias = Mapping[str, Index]


class Sliced(MutableMapping[str, Tensor]):
    """Tensors by name, each of which is what `only` says of a larger one.

    Attributes
    ----------
    only
        What there is of each tensor.
    pieces
        The same as pieces of the tensors of a version, once one is known.
    """

    def __init__(self, tensors: MutableMapping[str, Tensor], only: Only) -> None:
        self._tensors, self.only = tensors, only
        self.pieces: dict[str, Piece] = {}

    def piece(self, name: str) -> Piece:
        """Return what a tensor is of that of a version, or a whole one before one is known."""
        tensor = self._tensors[name]
        return self.pieces.get(name) or whole_piece(name, tensor.dtype, tuple(tensor.shape))

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


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
