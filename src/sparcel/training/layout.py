"""Where tensors lie in the flat vectors of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from sparcel.schemes import Layer


@dataclass(frozen=True)
class Piece:
    """A tensor's place in a flat vector: elements ``[start, stop)``.

    ``density`` is the tensor's own, or None for that of the scheme.
    """

    name: str
    start: int
    stop: int
    density: float | None = None


class Place(NamedTuple):
    """A tensor's place among all vectors of a step; ``size`` is that of the whole vector."""

    vector: int
    start: int
    size: int


Layout = Mapping[str, Place]
"""The places of all tensors, by name."""


def fits(layout: Layout, tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether tensors lie inside their vectors and do not overlap."""
    ranges = sorted(
        (vector, start, start + tensors[name].numel(), size)
        for name, (vector, start, size) in layout.items()
    )
    inside = all(start >= 0 and stop <= size for _, start, stop, size in ranges)
    return inside and all(
        vector != following or stop <= start
        for (vector, _, stop, _), (following, start, *_) in pairwise(ranges)
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


def copy_pieces(
    source: Tensor, pieces: Sequence[Piece], target: Tensor, places: Sequence[Piece]
) -> None:
    """Copy the tensors that two vectors have in common, from ``pieces`` to ``places``."""
    found = {piece.name: source[piece.start : piece.stop] for piece in pieces}
    for piece in places:
        if piece.name in found:
            target[piece.start : piece.stop] = found[piece.name]


def layers_of(pieces: Sequence[Piece], size: int) -> list[Layer]:
    """Return the layers of a vector, none if no tensor has a density of its own.

    Small tensors between two pieces are exchanged separately. Their slots are zero here and count
    as part of the preceding piece.
    """
    if all(piece.density is None for piece in pieces):
        return []
    ordered = sorted(pieces, key=lambda piece: piece.start)
    starts = [0, *(piece.start for piece in ordered[1:]), size]
    return [
        (start, stop, piece.density)
        for piece, (start, stop) in zip(ordered, pairwise(starts), strict=True)
    ]


def _moved(piece: Piece, start: int) -> Piece:
    return replace(piece, start=start, stop=start + piece.stop - piece.start)
