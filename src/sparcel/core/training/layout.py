"""Where tensors lie in the flat vectors of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from sparcel.core.device import read
from sparcel.core.memory import Range
from sparcel.core.schemes import Layer


@dataclass(frozen=True)
class Piece:
    """A tensor's place in a flat vector: elements ``[start, stop)``.

    ``density`` is the tensor's own, or None for that of the scheme.
    """

    name: str
    start: int
    stop: int
    density: float | None = None

    @property
    def place(self) -> Range:
        """Where it begins and ends."""
        return self.start, self.stop

    def of(self, vector: Tensor) -> Tensor:
        """Return the part of a vector in that place."""
        return vector[self.start : self.stop]


@dataclass(frozen=True)
class Arrangement:
    """The tensors of a flat vector: those that stay dense, and those that are made sparse."""

    small: tuple[Piece, ...] = ()
    large: tuple[Piece, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(piece.name for piece in (*self.large, *self.small))

    @cached_property
    def apart(self) -> list[Range]:
        """Where those that stay dense lie."""
        return [piece.place for piece in self.small]


class Position(NamedTuple):
    """A tensor's place among all vectors of a step; ``size`` is that of the whole vector."""

    vector: int
    start: int
    size: int


Layout = Mapping[str, Position]
"""The places of all tensors, by name."""


def fits(layout: Layout, tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether tensors lie inside their vectors, which have one size each, without overlaps."""
    ranges = sorted(
        (vector, start, start + tensors[name].numel(), size)
        for name, (vector, start, size) in layout.items()
    )
    inside = all(start >= 0 and stop <= size for _, start, stop, size in ranges)
    return inside and all(
        vector != following or (stop <= start and size == other)
        for (vector, _, stop, size), (following, start, _, other) in pairwise(ranges)
    )


def rearranged(
    layout: Layout, pieces: tuple[Piece, ...], size: int
) -> list[tuple[tuple[Piece, ...], int]]:
    """Return the vectors that hold the tensors of one vector in another layout.

    Returns
    -------
    list
        The pieces and the size of each vector. Empty if the layout has the same vector, or if it
        has no vectors with exactly these tensors.
    """
    by_name = {piece.name: piece for piece in pieces}
    numbers = {layout[name].vector for name in by_name if name in layout}
    placed = sorted(
        (place.vector, place.start, name)
        for name, place in layout.items()
        if place.vector in numbers
    )
    if {name for *_, name in placed} != by_name.keys():
        return []
    vectors = []
    for _, members in groupby(placed, key=itemgetter(0)):
        moved = [_moved(by_name[name], start) for _, start, name in members]
        vectors.append((tuple(moved), layout[moved[0].name].size))
    return [] if vectors == [(pieces, size)] else vectors


def end_to_end(tensors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Range]]:
    """Copy tensors of one dtype to a flat vector; return it, and where each lies in it, by name."""
    vector = torch.cat([tensor.flatten() for tensor in tensors.values()])
    stops = accumulate((tensor.numel() for tensor in tensors.values()), initial=0)
    return vector, dict(zip(tensors, pairwise(stops), strict=True))


def copy_pieces(
    source: Tensor, pieces: Sequence[Piece], target: Tensor, places: Sequence[Piece]
) -> None:
    """Copy the tensors that two vectors have in common, from ``pieces`` to ``places``."""
    found = {piece.name: piece.of(source) for piece in pieces}
    for piece in places:
        if piece.name in found:
            piece.of(target).copy_(found[piece.name])


def layers_of(pieces: Sequence[Piece], size: int) -> list[Layer]:
    """Return the layers of a vector, none if no tensor has a density of its own.

    Neighbours without a density of their own form one layer. Small tensors between two pieces are
    exchanged separately. Their slots are zero here and count as part of the preceding piece.
    """
    if all(piece.density is None for piece in pieces):
        return []
    ordered = sorted(pieces, key=lambda piece: piece.start)
    starts = [0, *(piece.start for piece in ordered[1:]), size]
    layers: list[Layer] = []
    for piece, (start, stop) in zip(ordered, pairwise(starts), strict=True):
        if layers and layers[-1][2] is None and piece.density is None:
            start = layers.pop()[0]
        layers.append((start, stop, piece.density))
    return layers


def joined(
    parts: Sequence[tuple[Tensor, Arrangement]], doubled: bool
) -> tuple[Tensor, Arrangement, list[tuple[Tensor, Tensor]]]:
    """Join vectors to one of the widest dtype, or of float64 if ``doubled``.

    Tensors with a density of their own go to the end, so that the others form one layer.

    Returns
    -------
    Tensor, Arrangement
        The vector that holds all others; one vector alone, if its other tensors are one layer.
    list
        Where its values belong: ranges of the given vectors, each with that range of the joined
        one. Empty for one vector alone.
    """
    cuts = [
        (part, arranged, start, stop, own is not None)
        for part, arranged in parts
        for start, stop, own in layers_of(arranged.large, len(part)) or [(0, len(part), None)]
    ]
    as_it_is = not doubled or parts[0][0].dtype == torch.float64
    if len(parts) == 1 and as_it_is and sum(not own for *_, own in cuts) <= 1:
        return *parts[0], []
    cuts.sort(key=itemgetter(4))  # stable: otherwise they stay in the order of queueing
    ranges = [part[start:stop] for part, _, start, stop, _ in cuts]
    vector = torch.cat(ranges)
    if doubled:
        vector = vector.double()
    small: list[Piece] = []
    large: list[Piece] = []
    end = 0
    for _, arranged, start, stop, _ in cuts:
        for pieces, moved in ((arranged.small, small), (arranged.large, large)):
            inside = (piece for piece in pieces if start <= piece.start < stop)
            moved.extend(_moved(piece, piece.start - start + end) for piece in inside)
        end += stop - start
    places = vector.split([len(values) for values in ranges])
    arrangement = Arrangement(tuple(small), tuple(large))
    return vector, arrangement, list(zip(ranges, places, strict=True))


def zeros_in(vector: Tensor, pieces: Sequence[Piece]) -> list[Range]:
    """Return the ranges of the tensors that are zero; there is at least one tensor."""
    occupied = read(torch.stack([piece.of(vector).any() for piece in pieces])).tolist()
    return [piece.place for piece, some in zip(pieces, occupied, strict=True) if not some]


def _moved(piece: Piece, start: int) -> Piece:
    return replace(piece, start=start, stop=start + piece.stop - piece.start)
