"""All-reduce in few rounds whose volume does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparcel import patterns
from sparcel.collectives._fold import fold, fold_steps, unfold, unfold_steps
from sparcel.ops import SUM, Op
from sparcel.schedule import ROUND, Exchange, Problem, Step, Work, merge_two
from sparcel.stream import SparseStream
from sparcel.wire import Wire, due


def halving_doubling(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks: partners share the work on ever smaller halves, then join them.

    With Q the largest power of two up to P, the P−Q ranks from Q on first fold their streams into
    those of ranks 0 … P−Q−1 and in the end get the result from them.

    Rounds: 2⌊log₂P⌋, and 2 more when P is no power of two. Words a rank: 2n(Q−1)/Q for dense
    streams; for sparse ones at most the fill-in of half the result in the last round of the first
    half; and the folding's.
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

    In each round partners send each other the half that the other one goes on with.
    """
    for peer, _, distance, _ in patterns.halving(wire.rank, len(boundaries) - 1):
        start, middle, stop = _halves(wire.rank, distance, boundaries)
        halves = [wire.compact(part, op) for part in total.split([0, middle - start, stop - start])]
        keep, give = halves if wire.rank < peer else halves[::-1]
        total = wire.exchange_and_reduce(keep, {peer: give}, [peer], bound, op)
        bound = None if bound is None else 2 * bound
    return total


def _double(total: SparseStream, boundaries: Sequence[int], wire: Wire, op: Op) -> SparseStream:
    """Join the regions of the first Q ranks: partners exchange all they have."""
    for peer, _, distance, _ in patterns.doubling(wire.rank, len(boundaries) - 1):
        start, middle, stop = _halves(wire.rank, distance, boundaries)
        size = stop - middle if wire.rank < peer else middle - start
        arrived = wire.exchange({peer: total}, {peer: due(total, size=size)})[peer]
        total = wire.concatenate([total, arrived] if wire.rank < peer else [arrived, total], op)
    return total


def _halves(rank: int, distance: int, boundaries: Sequence[int]) -> tuple[int, int, int]:
    """Return start, middle and stop of the range that a rank and its partner part, or join.

    The lower ranks' half comes first.
    """
    first = rank // (2 * distance) * 2 * distance
    start, middle, stop = boundaries[first : first + 2 * distance + 1 : distance]
    return start, middle, stop


def steps(problem: Problem) -> Iterator[Step]:
    """Yield the steps of `halving_doubling`."""
    rank, everyone = problem.rank, problem.everyone
    powers = patterns.fold(rank, problem.ranks).powers
    boundaries = patterns.regions(problem.size, powers)
    yield from fold_steps(problem)
    if rank < powers:
        yield Work("split", problem.k)
        for peer, _, distance, _ in patterns.halving(rank, powers):
            own, other = (_summed(r, distance, problem) for r in (rank, peer))
            start, middle, stop = _halves(rank, distance, boundaries)
            kept, given = ((start, middle), (middle, stop))[:: 1 if rank < peer else -1]
            message = problem.message(problem.stored(own, *given), given[1] - given[0])
            arriving = problem.message(problem.stored(other, *kept), kept[1] - kept[0])
            yield Work("small", ROUND, times=2)  # the halves are cut out first
            yield Work("encode", message)
            yield Exchange("pair", (message,), (arriving,), distance)
            yield Work("decode", problem.stored(other, *kept))
            yield from merge_two(problem, own, other, *kept)
        for peer, _, distance, _ in patterns.doubling(rank, powers):
            start, middle, stop = _halves(rank, distance, boundaries)
            held, due_there = ((start, middle), (middle, stop))[:: 1 if rank < peer else -1]
            message = problem.message(problem.stored(everyone, *held), held[1] - held[0])
            coming = problem.stored(everyone, *due_there)
            yield Work("small", ROUND)
            yield Work("encode", message)
            arriving = problem.message(coming, due_there[1] - due_there[0])
            yield Exchange("pair", (message,), (arriving,), distance)
            yield Work("decode", coming)
        yield Work("join", problem.entries(everyone))  # two in each round
    yield from unfold_steps(problem)


def _summed(rank: int, distance: int, problem: Problem) -> list[int]:
    """Return the ranks whose streams a rank has summed before it talks at ``distance``.

    The rounds before were at larger distances, so they are the ranks as far from it as a multiple
    of twice the distance, and those folded into them.
    """
    powers = patterns.fold(rank, problem.ranks).powers
    members = range(rank % (2 * distance), powers, 2 * distance)
    return [*members, *(r + powers for r in members if r + powers < problem.ranks)]
