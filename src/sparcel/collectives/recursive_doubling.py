"""All-reduce for small data: partners exchange all they have, at doubling distances."""

from __future__ import annotations

from collections.abc import Iterator

from sparcel import patterns
from sparcel.collectives._fold import fold, fold_stages, unfold, unfold_stages
from sparcel.formats import Expected
from sparcel.ops import SUM, Op
from sparcel.stages import ROUND_OPERATIONS, Exchange, Problem, Stage, Work, merge_two
from sparcel.stream import SparseStream
from sparcel.wire import Wire, collective


@collective
def recursive_doubling(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks: partners at doubling distances exchange their partial sums.

    Let Q be the largest power of two up to P. The P−Q ranks from Q on first fold their streams
    into those of ranks 0 … P−Q−1. They receive the result from the same ranks at the end.

    Words a rank: from 2k·log₂P (identical
    indices) to 2k(P−1) (disjoint ones), plus the words of the folding.
    Source: SparCML, section 5.3.1 (SSAR_Recursive_double) and appendix A.
    """
    total, bound = fold(stream, wire, op, max_nnz)
    total = wire.compact(total, op)
    powers = patterns.fold(wire.rank, wire.size).powers
    if wire.rank < powers:
        for peer, _, distance, _ in patterns.doubling(wire.rank, powers):
            # The ranks of a group pack the same sum. Partners reduce in the order of the ranks, so
            # both compute the same bits.
            packet = wire.pack(total, holder=wire.rank // distance * distance)
            pair = wire.exchange_and_reduce(packet.stream, {peer: packet}, [peer], bound, op)
            total = wire.compact(pair, op)
            bound = None if bound is None else 2 * bound
    if powers == wire.size:
        return total
    most = None if max_nnz is None else max_nnz * wire.size
    packets = [wire.pack(total, holder=0)] if wire.rank < powers else []
    return unfold(packets, wire, [Expected.like(total, most)])[0].stream


def stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of `recursive_doubling`."""
    rank, ranks = problem.rank, problem.ranks
    powers = patterns.fold(rank, ranks).powers
    yield from fold_stages(problem)
    if rank < powers:
        for peer, _, distance, _ in patterns.doubling(rank, powers):
            held, other = _group(rank, distance, ranks), _group(peer, distance, ranks)
            message = problem.message(problem.entries(held))
            arriving = problem.message(problem.entries(other))
            yield Work("small", ROUND_OPERATIONS)
            yield Work("encode", message)
            inside = distance < problem.ranks_per_node
            yield Exchange("shift", (message,), (arriving,), distance, inside)
            yield from merge_two(problem, held, other)
    yield from unfold_stages(problem, problem.message(problem.entries(problem.everyone)))


def _group(rank: int, distance: int, ranks: int) -> list[int]:
    """Return the ranks in a rank's partial sum before its exchange at ``distance``."""
    powers = patterns.fold(rank, ranks).powers
    first = rank // distance * distance
    members = range(first, first + distance)
    return [*members, *(r + powers for r in members if r + powers < ranks)]
