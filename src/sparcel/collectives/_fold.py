"""Folding for any P: each rank beyond the largest power of two hands its stream to a partner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparcel import patterns
from sparcel.formats import Expected, Packet
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
        wire.exchange({partner: wire.pack_region(own)}, {})
    elif partner is not None:
        own = wire.exchange_and_reduce(own, {}, [partner], max_nnz, op)
    if max_nnz is not None and powers < wire.size:
        max_nnz *= 2
    return own, max_nnz


def unfold(packets: list[Packet], wire: Wire, expected: Sequence[Expected]) -> list[Packet]:
    """Return the result's packets; ranks beyond the power of two receive them from partners."""
    powers, partner = patterns.fold(wire.rank, wire.size)
    if partner is None:
        return packets
    if wire.rank < powers:
        wire.exchange_lists(partner, packets, [])
        return packets
    return wire.exchange_lists(partner, [], expected)


def fold_stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of `fold`."""
    powers, partner = patterns.fold(problem.rank, problem.ranks)
    if partner is None:
        return
    busy = (problem.ranks - powers) / problem.ranks
    own = problem.region_message([problem.rank], 0, problem.size)
    other = problem.region_message([partner], 0, problem.size)
    yield Work("encode", own, busy)
    if problem.rank >= powers:
        yield Exchange("tree", (own,), (), powers)
    else:
        yield Exchange("tree", (), (other,), powers)
        yield Work("merge", problem.entries([problem.rank]) + problem.entries([partner]), busy)


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
