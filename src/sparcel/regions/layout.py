"""Regions of interleaved blocks, and how much of them travels in a phase."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparcel.formats import Format
from sparcel.units import share_of

LARGEST_BLOCK, SMALLEST_BLOCK = 16384, 64
"""Coordinates of a block: the most keep a pass in the same pages of memory for a while, the fewest
are a word of a bitmap."""

_BLOCKS_EACH = 16
"""How many blocks a rank owns, at least, before blocks are made longer."""

_ROOM, _SPARE = 2, 64
"""A message has room for so many times the entries that are expected, and some more: a threshold
from a sample lets a few more through, and ties may let all through."""


@dataclass(frozen=True)
class Regions:
    """A vector that is divided in blocks, of which rank r owns every P-th from the r-th on.

    Large and small coordinates lie close together in gradients, so interleaved blocks give all
    owners about as much, without a look at the data. A region is numbered block by block.
    """

    size: int
    ranks: int
    block: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, size: int, ranks: int) -> Regions:
        """Return the regions of a vector, the same on all ranks."""
        wanted = max(1, size // (_BLOCKS_EACH * ranks))
        block = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << wanted.bit_length() - 1))
        return cls(size, ranks, block)

    def before(self, rank: int, end: int) -> int:
        """Return how many of the coordinates below ``end`` a rank owns."""
        whole, rest = divmod(end, self.block)
        owned = (whole + self.ranks - 1 - rank) // self.ranks
        return owned * self.block + (rest if whole % self.ranks == rank else 0)

    def length(self, rank: int) -> int:
        """Return how many coordinates a rank owns."""
        return self.before(rank, self.size)

    def take(self, vector: Tensor, rank: int) -> Tensor:
        """Return a copy of a rank's region of a vector ``[size]``."""
        return torch.cat([part.reshape(-1) for part in self._parts(vector, rank)])

    def put(self, vector: Tensor, rank: int, region: Tensor) -> None:
        """Write a rank's region to a vector ``[size]``."""
        body, rest = self._parts(vector, rank)
        body.copy_(region[: body.numel()].view_as(body))
        rest.copy_(region[body.numel() :])

    def coordinates(self, rank: int, places: Tensor) -> Tensor:
        """Return the coordinates (int64) of places in a rank's region."""
        numbers = places.long()
        turns = numbers.div(self.block, rounding_mode="floor")
        others = turns * (self.ranks - 1) + rank  # the blocks before it that others own
        return numbers.add(others, alpha=self.block)

    def elsewhere(self, rank: int, places: Tensor) -> Tensor:
        """Return the coordinates of places among those that other ranks own."""
        numbers, others = places.long(), self.ranks - 1
        shifted = numbers + (others - rank) * self.block
        own = shifted.div(others * self.block, rounding_mode="floor")  # the rank's blocks before it
        return numbers.add(own, alpha=self.block)

    def _parts(self, vector: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return views of a region: of whole turns ``[turns, block]``, and of the rest."""
        turn = self.ranks * self.block
        whole = self.size // turn
        body = vector[: whole * turn].view(whole, self.ranks, self.block)[:, rank]
        start = whole * turn + rank * self.block
        return body, vector[start : start + self.block]


Shares = tuple[tuple[int, float], ...]
"""Where ranges of a vector stop, one after another, and their densities in (0, 1]."""


@dataclass(frozen=True)
class Phase:
    """What travels in one of two exchanges: a share of each region, or all.

    Attributes
    ----------
    shares
        How much of which coordinates travels.
    dense
        Whether all coordinates travel, without their places.
    most
        The most entries of each region that a message holds, by rank.
    expected
        How many entries of each region the densities ask for, by rank.
    bounds
        The most bytes of a message of each region, by rank.
    """

    regions: Regions
    shares: Shares
    dense: bool
    most: tuple[int, ...]
    expected: tuple[int, ...]
    bounds: tuple[int, ...]


@lru_cache(maxsize=1024)
def phase(regions: Regions, shares: Shares, format: Format, value_bytes: int) -> Phase:
    """Return the phase in which shares of the regions travel; see `Phase`."""
    expected, most = [], []
    for rank in range(regions.ranks):
        asked, room, first = 0, 0, 0
        for stop, density in shares:
            last = regions.before(rank, stop)
            wanted = share_of(density, last - first)
            asked += wanted
            room += min(last - first, _ROOM * wanted + _SPARE)
            first = last
        expected.append(asked)
        most.append(room)
    lengths = [regions.length(rank) for rank in range(regions.ranks)]
    dense = sum(expected) >= format.dense_from(max(1, regions.size), value_bytes)
    if dense:
        expected = most = lengths
    bounds = [
        format.nbytes(None if dense else nnz, length, value_bytes)
        for nnz, length in zip(most, lengths, strict=True)
    ]
    return Phase(regions, shares, dense, tuple(most), tuple(expected), tuple(bounds))
