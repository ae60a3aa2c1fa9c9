"""Regions of interleaved blocks, and how much of them travels in a leg of an exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

LARGEST_BLOCK, SMALLEST_BLOCK = 16384, 64
"""Coordinates of a block: the most keep a pass in the same pages of memory for a while, the fewest
are a word of a bitmap."""

_BLOCKS_EACH = 16
"""How many blocks a rank owns, at least, before blocks are made longer."""

_ROW_ALIGNMENT = 16

Densities = tuple[tuple[int, float], ...]
"""Where ranges of a vector stop, one after another, and their densities in (0, 1]."""


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

    def parts(
        self, shares: Densities, rank: int, others: bool = False
    ) -> Iterator[tuple[int, float, int, int]]:
        """Yield where each share stops, its density, and the range of its places.

        These are places of the rank's region, or of all that other ranks own.
        """
        first = 0
        for stop, density in shares:
            owned = self.before(rank, stop)
            last = stop - owned if others else owned
            yield stop, density, first, last
            first = last

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


def row_bytes(bounds: Sequence[int]) -> int:
    """Return the bytes of a row in which each message fits, given what bounds their bytes.

    GPUs make messages in rows of a tensor, and communicators pass such rows on. A row begins where
    any dtype may.
    """
    return -(-max(bounds) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


class Code(Protocol):
    """What writes messages and reads them, whatever their format; see `sparcel.formats`."""

    def encode(
        self,
        size: int,
        indices: Tensor | None,
        values: Tensor,
        finite: bool | Tensor,
        turn: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Return the message (uint8) of entries of a region, and the values that it holds.

        ``turn`` decides random rounding: the step, the rank, and the number of the message.
        """

    def decode(
        self, size: int, dtype: torch.dtype, message: Tensor
    ) -> tuple[Tensor | None, Tensor, bool | Tensor]:
        """Return the indices, None for all, the values, and whether all are finite.

        Raises
        ------
        FormatError, MismatchError
            When it is no such message.
        """


@dataclass(frozen=True)
class Leg:
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
    headers
        How messages of each region begin, by rank, but for what a step decides: the count, the
        length, and whether all is finite.
    dtype
        The dtype of the values that messages stand for: that of the memory.
    bits, group
        The bits of a value, and how many values share a scale, in the format that compiled passes
        know: few bits to nearest, scales in bfloat16, places packed. 0 for any other.
    code
        What writes and reads messages in any format.
    """

    regions: Regions
    shares: Densities
    dense: bool
    most: tuple[int, ...]
    expected: tuple[int, ...]
    bounds: tuple[int, ...]
    headers: tuple[bytes, ...]
    dtype: torch.dtype
    bits: int
    group: int
    code: Code
