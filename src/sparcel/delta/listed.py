"""The chunks of a delta, as the header of a file lists them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparcel.delta.pieces import Piece
from sparcel.delta.slices import Only, Slice
from sparcel.errors import shown

_CHUNK = re.compile(
    r"chunk\.(\d{1,9})(?:\.(\d{1,19})-(\d{1,19})\.([\dx]*)\.(.*))?", re.ASCII | re.DOTALL
)
"""How files name chunks: by their number, and maybe by which elements of which tensor they tell."""


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

    def concerns(self, only: Only) -> bool:
        """Tell whether it may tell of what a reader has."""
        if self.name is None or self.name not in only:
            return self.name is None
        begin, end = Slice.of(only[self.name], self.name, self.shape).rows(self.shape)
        return self.first == 0 if begin == end else self.first < end and begin < self.end
