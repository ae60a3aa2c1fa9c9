"""Folding for any P: each rank beyond the largest power of two hands its stream to a partner."""

from __future__ import annotations

from collections.abc import Iterator

from sparcel import patterns
from sparcel.formats import Expected
from sparcel.ops import Op
from sparcel.stages import Exchange, Problem, Stage, Work
from sparcel.stream import SparseStream
from sparcel.wire import Wire


def fold(
    own: SparseStream, wire: Wire, op: Op, max_nnz: int | None
) -> tuple[SparseStream, int | None]:
    """Send this rank's stream to its partner, or reduce with the partner's.

    Returns the stream that this rank continues with, and a bound on the entries of any rank.
    """
    powers, partner = patterns.fold(wire.rank, wire.size)
    if wire.rank >= powers:
        assert partner is not None, "a rank beyond the power of two has a partner"
        wire.exchange({partner: own}, {})
    elif partner is not None:
        own = wire.exchange_and_reduce(own, {}, [partner], max_nnz, op)
    if max_nnz is not None and powers < wire.size:
        max_nnz *= 2
    return own, max_nnz


def unfold(total: SparseStream, wire: Wire, max_nnz: int | None) -> SparseStream:
    """Return the result; ranks beyond the power of two receive it from their partners."""
    powers, partner = patterns.fold(wire.rank, wire.size)
    if partner is None:
        return total
    if wire.rank < powers:
        wire.exchange({partner: total}, {})
        return total
    return wire.exchange({}, {partner: Expected.like(total, max_nnz)})[partner]


def group(rank: int, distance: int, ranks: int) -> list[int]:
    """Return the ranks in a rank's partial sum before its exchange at ``distance``."""
    powers = patterns.fold(rank, ranks).powers
    first = rank // distance * distance
    members = range(first, first + distance)
    return [*members, *(r + powers for r in members if r + powers < ranks)]


def fold_stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of `fold`."""
    powers, partner = patterns.fold(problem.rank, problem.ranks)
    if partner is None:
        return
    busy = (problem.ranks - powers) / problem.ranks
    own, other = problem.entries([problem.rank]), problem.entries([partner])
    yield Work("encode", problem.message(own), busy)
    if problem.rank >= powers:
        yield Exchange("tree", (problem.message(own),), (), powers)
    else:
        yield Exchange("tree", (), (problem.message(other),), powers)
        yield Work("merge", own + other, busy)


def unfold_stages(problem: Problem, message: float) -> Iterator[Stage]:
    """Yield the stages of `unfold`; ``message`` is the bytes of the result's message."""
    powers, partner = patterns.fold(problem.rank, problem.ranks)
    if partner is None:
        return
    yield Work("encode", message, (problem.ranks - powers) / problem.ranks)
    if problem.rank >= powers:
        yield Exchange("tree", (), (message,), powers)
    else:
        yield Exchange("tree", (message,), (), powers)
