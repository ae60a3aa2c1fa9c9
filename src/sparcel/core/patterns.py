"""Communication patterns: whom a rank talks to in each round, as pure functions.

Every function takes a rank and the number of ranks and returns that rank's rounds. What travels in
a round is the caller's business; how many bytes it takes is the format's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Round(NamedTuple):
    """Whom a rank sends to and whom it receives from in one round.

    ``distance`` is how many ranks apart the two ends of a message are. ``blocks`` is how many
    ranks' blocks a message holds.
    """

    to: int
    source: int
    distance: int
    blocks: int = 1


class Level(NamedTuple):
    """Whom a rank sends to, or receives from, at one level of a tree; None is nobody.

    ``distance`` and ``blocks`` are as of a `Round`; a rank without a message has no blocks.
    """

    to: int | None
    source: int | None
    distance: int
    blocks: int


class Fold(NamedTuple):
    """How the ranks beyond the largest power of two take part through one of the others.

    ``powers`` is Q, the largest power of two up to P. Rank r < P−Q also stands for rank r + Q;
    these two are partners. ``partner`` is None for a rank without one.
    """

    powers: int
    partner: int | None


def bruck(rank: int, ranks: int) -> list[Round]:
    """Gather every rank's block on every rank in ⌈log₂P⌉ rounds.

    Before round t a rank holds the blocks of 2^t ranks: its own and those of the ranks above it. It
    sends the first ``blocks`` of them to the rank 2^t below.

    Source: Bruck et al. 1997, the concatenation algorithm.
    """
    rounds = []
    distance = 1
    while distance < ranks:
        below, above = (rank - distance) % ranks, (rank + distance) % ranks
        rounds.append(Round(below, above, distance, min(distance, ranks - distance)))
        distance *= 2
    return rounds


def binomial_tree(rank: int, ranks: int, root: int = 0) -> list[Level]:
    """Send from the root to all ranks in ⌈log₂P⌉ rounds.

    A rank's place is its distance from the root, upwards and around. At each level the ranks that
    have received pass on what is meant for the receiver's subtree, ``blocks`` places from its own
    on.
    """
    place = (rank - root) % ranks
    levels = []
    distance = 1 << (ranks - 1).bit_length()
    while distance > 1:
        distance //= 2
        to = source = None
        count = 0
        if place % (2 * distance) == 0 and place + distance < ranks:
            to, count = (rank + distance) % ranks, min(distance, ranks - place - distance)
        elif place % (2 * distance) == distance:
            source, count = (rank - distance) % ranks, min(distance, ranks - place)
        levels.append(Level(to, source, distance, count))
    return levels


def binomial_reduction(rank: int, ranks: int) -> list[Level]:
    """Bring all ranks' blocks to rank 0: the levels of `binomial_tree`, from the leaves up."""
    return [
        Level(level.source, level.to, level.distance, level.blocks)
        for level in reversed(binomial_tree(rank, ranks))
    ]


def fold(rank: int, ranks: int) -> Fold:
    """Return how the ranks beyond the largest power of two take part."""
    powers = 1 << (ranks.bit_length() - 1)
    if rank >= powers:
        return Fold(powers, rank - powers)
    return Fold(powers, rank + powers if rank + powers < ranks else None)


def doubling(rank: int, ranks: int) -> list[Round]:
    """Pair the ranks at distances 1, 2, 4, …; ``ranks`` is a power of two."""
    distances = [1 << level for level in range(ranks.bit_length() - 1)]
    return [Round(rank ^ distance, rank ^ distance, distance) for distance in distances]


def halving(rank: int, ranks: int) -> list[Round]:
    """Pair the ranks at distances …, 4, 2, 1; ``ranks`` is a power of two."""
    return doubling(rank, ranks)[::-1]


def ring(rank: int, ranks: int) -> list[Round]:
    """Pass blocks on to the next rank, P−1 times."""
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    return [Round(after, before, 1) for _ in range(ranks - 1)]


@lru_cache(maxsize=64)
def rotation(rank: int, ranks: int) -> tuple[Round, ...]:
    """Send to each other rank directly, each rank beginning with the one after it.

    No rank is everybody's first: in step s all messages go s ranks up.
    """
    return tuple([Round((rank + s) % ranks, (rank - s) % ranks, s) for s in range(1, ranks)])


def cuts(size: int, ranks: int) -> list[int]:
    """Return the P+1 boundaries of the regions: rank r owns ``[r·n // P, (r+1)·n // P)``."""
    return [rank * size // ranks for rank in range(ranks + 1)]
