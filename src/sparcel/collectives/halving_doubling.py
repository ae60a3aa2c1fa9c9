"""All-reduce in few rounds, with a volume that does not grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from sparcel import patterns
from sparcel.collectives._fold import fold, fold_stages, unfold, unfold_stages
from sparcel.formats import Expected, Packet
from sparcel.ops import SUM, Op
from sparcel.stages import ROUND_OPERATIONS, Exchange, Problem, Stage, Work, copied
from sparcel.stream import SparseStream
from sparcel.wire import Wire, collective


@collective
def halving_doubling(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks: partners each reduce one half, recursively, then exchange the halves.

    Let Q be the largest power of two up to P. The P−Q ranks from Q on first fold their streams
    into those of ranks 0 … P−Q−1. They receive the result from the same ranks at the end.

    Words a rank: 2n(Q−1)/Q for dense streams; for sparse ones at most the fill-in of half the
    result in the last round of the first half; plus the words of the folding.
    Source: Rabenseifner's algorithm, as in Thakur, Rabenseifner and Gropp 2005, section 4.4.
    """
    powers = patterns.fold(wire.rank, wire.size).powers
    boundaries = patterns.regions(stream.size, powers)
    total, bound = fold(stream, wire, op, max_nnz)
    packets: list[Packet] = []
    if wire.rank < powers:
        region = _halve(total, boundaries, wire, op, bound)
        own = wire.pack_region(region, boundaries[wire.rank])
        packets = _double(own, boundaries, wire)
    packets = unfold(packets, wire, _regions(stream, boundaries))
    return wire.concatenate([packet.stream for packet in packets], op)


def _halve(
    total: SparseStream, boundaries: Sequence[int], wire: Wire, op: Op, bound: int | None
) -> SparseStream:
    """Return this rank's region of the sum over the first Q ranks.

    In each round, each rank keeps one half of its range and sends the other half to its partner.
    """
    for peer, _, distance, _ in patterns.halving(wire.rank, len(boundaries) - 1):
        start, middle, stop = _halves(wire.rank, distance, boundaries)
        halves = total.split([0, middle - start, stop - start])
        keep, give = halves if wire.rank < peer else halves[::-1]
        given = wire.pack_region(give, middle if wire.rank < peer else start)
        total = wire.exchange_and_reduce(keep, {peer: given}, [peer], bound, op)
        bound = None if bound is None else 2 * bound
    return total


def _double(own: Packet, boundaries: Sequence[int], wire: Wire) -> list[Packet]:
    """Gather the regions of the first Q ranks: partners exchange all packets that they hold."""
    held, regions = [own], _regions(own.stream, boundaries)
    for peer, _, distance, _ in patterns.doubling(wire.rank, len(boundaries) - 1):
        first = peer // distance * distance
        expected = regions[first : first + distance]
        arrived = wire.exchange_lists(peer, held, expected)
        held = [*held, *arrived] if wire.rank < peer else [*arrived, *held]
    return held


def _regions(like: SparseStream, boundaries: Sequence[int]) -> list[Expected]:
    """Return what is known of the regions' streams."""
    return [Expected.like(like, size=stop - start) for start, stop in pairwise(boundaries)]


def _halves(rank: int, distance: int, boundaries: Sequence[int]) -> tuple[int, int, int]:
    """Return start, middle and stop of the range that a rank and its partner split.

    The first half belongs to the lower rank.
    """
    first = rank // (2 * distance) * 2 * distance
    start, middle, stop = boundaries[first : first + 2 * distance + 1 : distance]
    return start, middle, stop


def stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of `halving_doubling`."""
    rank = problem.rank
    powers = patterns.fold(rank, problem.ranks).powers
    halves = _Halves(problem, patterns.regions(problem.size, powers))
    yield from fold_stages(problem)
    if rank < powers:
        yield copied(problem.k)
        for peer, _, distance, _ in patterns.halving(rank, powers):
            yield Work("small", ROUND_OPERATIONS, times=2)  # the halves are cut out first
            given, coming = halves.part(rank, peer, distance), halves.part(peer, rank, distance)
            yield Work("encode", given.nbytes)
            yield from _swap(problem, given, coming, distance)
            start, stop = halves.range(rank, distance)
            summed = halves.summed(rank, 2 * distance), halves.summed(peer, 2 * distance)
            yield Work("merge", sum(problem.entries(ranks, start, stop) for ranks in summed))
        for peer, _, distance, _ in patterns.doubling(rank, powers):
            held, coming = halves.joined(rank, distance), halves.joined(peer, distance)
            yield Work("small", ROUND_OPERATIONS)
            yield from _swap(problem, held, coming, distance)
        yield Work("encode", halves.joined(rank, 1).nbytes)
        yield copied(problem.entries(problem.everyone))
    yield from unfold_stages(problem, halves.joined(rank % powers, powers).nbytes)


class _Part(NamedTuple):
    """A message's bytes, and how many coordinates it stores."""

    nbytes: float
    stored: float


def _swap(problem: Problem, given: _Part, coming: _Part, distance: int) -> Iterator[Stage]:
    """Yield the exchange of two partners, as in both halves of the algorithm."""
    inside = distance < problem.ranks_per_node
    yield Exchange("shift", (given.nbytes,), (coming.nbytes,), distance, inside)
    yield copied(coming.stored)


class _Halves:
    """The partial sums that ranks hold in each round.

    After the exchange with a partner at ``distance``, a rank holds a range of ``distance``
    regions. Its sum covers the ranks whose distance to it is a multiple of ``distance``.
    """

    def __init__(self, problem: Problem, boundaries: Sequence[int]) -> None:
        self.problem, self.boundaries, self.powers = problem, boundaries, len(boundaries) - 1
        self.region = cache(self._region)

    def range(self, rank: int, distance: int) -> tuple[int, int]:
        """Return the aligned range of ``distance`` regions that contains the rank's region."""
        first = rank // distance * distance
        return self.boundaries[first], self.boundaries[first + distance]

    def summed(self, rank: int, distance: int) -> list[int]:
        """Return the ranks in a rank's partial sum, folded ranks included."""
        members = range(rank % distance, self.powers, distance)
        return [
            *members,
            *(r + self.powers for r in members if r + self.powers < self.problem.ranks),
        ]

    def part(self, sender: int, receiver: int, distance: int) -> _Part:
        """Return the part of its partial sum that a rank sends to its partner."""
        return self._part(self.summed(sender, 2 * distance), *self.range(receiver, distance))

    def joined(self, rank: int, distance: int) -> _Part:
        """Return what a rank holds of the result when it has gathered ``distance`` regions."""
        first = rank // distance * distance
        regions = [self.region(one) for one in range(first, first + distance)]
        nbytes, stored = map(sum, zip(*regions, strict=True))
        return _Part(nbytes, stored)

    def _region(self, rank: int) -> _Part:
        """Return the message of a rank's own region of the result."""
        return self._part(self.problem.everyone, *self.range(rank, 1))

    def _part(self, ranks: Sequence[int], start: int, stop: int) -> _Part:
        """Return the message of the sum of some ranks' streams in a range."""
        stored = self.problem.entries(ranks, start, stop)
        return _Part(self.problem.region_message(ranks, start, stop), stored)
