"""All-reduce in few rounds, with a volume that does not grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from sparcel import patterns
from sparcel.collectives._fold import fold, fold_stages, unfold, unfold_stages
from sparcel.formats import Expected
from sparcel.ops import SUM, Op
from sparcel.stages import ROUND_OPERATIONS, Exchange, Problem, Stage, Work, copied, merge_two
from sparcel.stream import SparseStream
from sparcel.wire import Wire, collective


@collective
def halving_doubling(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks: partners each reduce one half, recursively, then exchange the halves.

    Let Q be the largest power of two up to P. The P−Q ranks from Q on first fold their streams
    into those of ranks 0 … P−Q−1. They receive the result from the same ranks at the end.

    Rounds: 2⌊log₂P⌋, and 2 more if P is not a power of two. Words a rank: 2n(Q−1)/Q for dense
    streams; for sparse ones at most the fill-in of half the result in the last round of the first
    half; plus the words of the folding.
    Source: Rabenseifner's algorithm, as in Thakur, Rabenseifner and Gropp 2005, section 4.4.
    """
    powers = patterns.fold(wire.rank, wire.size).powers
    boundaries = patterns.regions(stream.size, powers)
    total, bound = fold(wire.compact(stream, op), wire, op, max_nnz)
    if wire.rank < powers:
        total = _halve(total, boundaries, wire, op, bound)
        total = _double(total, boundaries, wire, op)
    return unfold(total, wire, None)


def _halve(
    total: SparseStream, boundaries: Sequence[int], wire: Wire, op: Op, bound: int | None
) -> SparseStream:
    """Return this rank's region of the sum over the first Q ranks.

    In each round, each rank keeps one half of its range and sends the other half to its partner.
    """
    for peer, _, distance, _ in patterns.halving(wire.rank, len(boundaries) - 1):
        start, middle, stop = _halves(wire.rank, distance, boundaries)
        halves = [wire.compact(part, op) for part in total.split([0, middle - start, stop - start])]
        keep, give = halves if wire.rank < peer else halves[::-1]
        total = wire.exchange_and_reduce(keep, {peer: give}, [peer], bound, op)
        bound = None if bound is None else 2 * bound
    return total


def _double(total: SparseStream, boundaries: Sequence[int], wire: Wire, op: Op) -> SparseStream:
    """Join the regions of the first Q ranks: partners exchange everything they hold."""
    for peer, _, distance, _ in patterns.doubling(wire.rank, len(boundaries) - 1):
        start, middle, stop = _halves(wire.rank, distance, boundaries)
        size = stop - middle if wire.rank < peer else middle - start
        arrived = wire.exchange({peer: total}, {peer: Expected.like(total, size=size)})[peer]
        total = wire.concatenate([total, arrived] if wire.rank < peer else [arrived, total], op)
    return total


def _halves(rank: int, distance: int, boundaries: Sequence[int]) -> tuple[int, int, int]:
    """Return start, middle and stop of the range that a rank and its partner split, or join.

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
            given, coming = halves.part(rank, peer, distance), halves.part(peer, rank, distance)
            yield Work("small", ROUND_OPERATIONS, times=2)  # the halves are cut out first
            yield from _swap(problem, given, coming, distance)
            start, stop = halves.range(rank, distance)
            own, other = halves.summed(rank, 2 * distance), halves.summed(peer, 2 * distance)
            yield from merge_two(problem, own, other, start, stop)
        for peer, _, distance, _ in patterns.doubling(rank, powers):
            held, coming = halves.joined(rank, distance), halves.joined(peer, distance)
            yield Work("small", ROUND_OPERATIONS)
            yield from _swap(problem, held, coming, distance)
        yield copied(problem.entries(problem.everyone))  # two in each round
    total = halves.joined(rank % powers, powers)
    yield from unfold_stages(problem, problem.message(*total))


class _Part(NamedTuple):
    """A message's stored coordinates, and the size of its range."""

    stored: float
    size: int


def _swap(problem: Problem, given: _Part, coming: _Part, distance: int) -> Iterator[Stage]:
    """Yield the exchange of two partners, as in both halves of the algorithm."""
    message, arriving = problem.message(*given), problem.message(*coming)
    yield Work("encode", message)
    inside = distance < problem.ranks_per_node
    yield Exchange("shift", (message,), (arriving,), distance, inside)
    yield copied(coming.stored)


class _Halves:
    """The partial sums that ranks hold in each round.

    After the exchange with a partner at ``distance``, a rank holds a range of ``distance``
    regions. Its sum covers the ranks whose distance to it is a multiple of ``distance``. A dense
    partial sum stays dense.
    """

    def __init__(self, problem: Problem, boundaries: Sequence[int]) -> None:
        self.problem, self.boundaries, self.powers = problem, boundaries, len(boundaries) - 1
        self.is_dense = cache(self._is_dense)

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
        start, stop = self.range(receiver, distance)
        if self.is_dense(sender, 2 * distance):
            return _Part(stop - start, stop - start)
        return _Part(
            self.problem.entries(self.summed(sender, 2 * distance), start, stop), stop - start
        )

    def joined(self, rank: int, distance: int) -> _Part:
        """Return the part of the result that a rank holds after it joined ``distance`` regions."""
        start, stop = self.range(rank, distance)
        if distance == 1:
            everyone = self.problem.entries(self.problem.everyone, start, stop)
            stored = stop - start if self.is_dense(rank, 1) else everyone
        else:
            half = distance // 2
            stored = self.joined(rank, half).stored + self.joined(rank ^ half, half).stored
        dense = self.problem.is_dense(stored, stop - start)
        return _Part(stop - start if dense else stored, stop - start)

    def _is_dense(self, rank: int, distance: int) -> bool:
        """Tell whether a rank's partial sum is dense, because of its count or a dense summand."""
        start, stop = self.range(rank, distance)
        stored = self.problem.stored(self.summed(rank, distance), start, stop)
        if self.problem.is_dense(stored, stop - start):
            return True
        before = (rank, rank ^ distance) if distance < self.powers else ()
        return any(self.is_dense(other, 2 * distance) for other in before)
