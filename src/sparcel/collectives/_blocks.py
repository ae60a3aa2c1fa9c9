"""Gathering of the owners' blocks of winners, with or without evening them out first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from sparcel import patterns
from sparcel.formats import Expected, Lengths
from sparcel.stages import Exchange, Problem, Stage, Work, copied, gather_stages, gather_traffic
from sparcel.stream import SparseStream
from sparcel.wire import Wire


class Move(NamedTuple):
    """Consecutive entries ``[start, stop)`` that move from rank ``owner`` to rank ``target``.

    The K entries of all ranks are numbered in the order of their indices.
    """

    start: int
    stop: int
    owner: int
    target: int


def moves_to_even(counts: Sequence[int]) -> list[Move]:
    """Return the moves that even out the ranks' entries; afterwards counts differ by at most one.

    Rank r has ``counts[r]`` entries before, which follow those of rank r−1. Afterwards it has the
    entries ``[r·K // P, (r+1)·K // P)``. There are at most 2P moves, many of them from a
    rank to itself.
    """
    ends = list(accumulate(counts))
    targets = patterns.regions(ends[-1], len(counts))[1:]
    cuts = sorted({0, *ends, *targets})
    return [
        Move(start, stop, bisect_right(ends, start), bisect_right(targets, start))
        for start, stop in pairwise(cuts)
    ]


def evening_pays(lengths: Lengths, counts: Sequence[int], boundaries: Sequence[int]) -> bool:
    """Tell whether evening out saves the worst rank an eighth of its bytes.

    Less would not pay, because evening out takes another exchange.
    """
    direct = direct_volume(lengths, counts, boundaries)
    return 8 * evened_volume(lengths, counts) < 7 * direct


def gather_blocks(
    block: SparseStream,
    counts: Sequence[int],
    boundaries: Sequence[int],
    wire: Wire,
    evened: bool,
) -> SparseStream:
    """Give every rank all blocks of winners, each numbered from the start of its rank's region."""
    if evened:
        block = block.placed(boundaries[wire.rank], boundaries[-1])
        return gather_evened(block, counts, wire)
    return gather_direct(block, counts, boundaries, wire)


def gather_direct(
    block: SparseStream, counts: Sequence[int], boundaries: Sequence[int], wire: Wire
) -> SparseStream:
    """Gather and join the ranks' blocks, each numbered from the start of its rank's region."""
    expected = [
        Expected.like(block, nnz, stop - start)
        for nnz, (start, stop) in zip(counts, pairwise(boundaries), strict=True)
    ]
    parts = wire.gather(wire.pack_region(block, boundaries[wire.rank]), expected)
    size = boundaries[-1]
    return _join([part.placed(boundaries[rank], size) for rank, part in enumerate(parts)])


def gather_evened(block: SparseStream, counts: Sequence[int], wire: Wire) -> SparseStream:
    """Even out the ranks' blocks, sparse parts of one vector, then gather and join them.

    Source: Ok-Topk, section 3.1.2 (data balancing).
    """
    share = -(-sum(counts) // wire.size)
    block = _even_out(block, moves_to_even(counts), wire)
    expected = [Expected.like(block, share, stays_sparse=True)] * wire.size
    return _join(wire.gather(wire.pack(block), expected))


def _even_out(block: SparseStream, moves: Sequence[Move], wire: Wire) -> SparseStream:
    """Send and receive the entries that move to other ranks."""
    rank = wire.rank
    leaving = [move for move in moves if move.owner == rank]
    parts = {move.target: part for move, part in zip(leaving, _cut(block, leaving), strict=True)}
    coming = {
        move.owner: Expected.like(block, move.stop - move.start, stays_sparse=True)
        for move in moves
        if move.target == rank
    }
    arrived = wire.exchange(
        {target: wire.pack(part) for target, part in parts.items() if target != rank},
        {owner: one for owner, one in coming.items() if owner != rank},
    )
    held = {owner: packet.stream for owner, packet in arrived.items()}
    if rank in coming:
        held[rank] = parts[rank]
    return _join([block.empty_like(), *(held[owner] for owner in coming)])


def _cut(block: SparseStream, moves: Sequence[Move]) -> list[SparseStream]:
    """Cut a sparse stream into consecutive parts; indices stay as they are."""
    assert block.indices is not None, "winners are sparse"
    lengths = [move.stop - move.start for move in moves]
    parts = zip(block.indices.split(lengths), block.values.split(lengths), strict=True)
    return [SparseStream.unchecked(indices, values, block.size) for indices, values in parts]


def _join(parts: Sequence[SparseStream]) -> SparseStream:
    """Join sparse streams of one vector whose indices follow each other."""
    indices = [part.indices for part in parts if part.indices is not None]
    values = torch.cat([part.values for part in parts])
    return SparseStream.unchecked(torch.cat(indices), values, parts[0].size)


def direct_volume(lengths: Lengths, counts: Sequence[int], boundaries: Sequence[int]) -> float:
    """Return the worst rank's volume in `gather_direct` of ``counts`` entries a rank."""
    traffic = gather_traffic(_direct_blocks(lengths, counts, boundaries))
    return max(max(sent, received) for sent, received in traffic)


def evened_volume(lengths: Lengths, counts: Sequence[int]) -> float:
    """Return the worst rank's volume in `gather_evened` of ``counts`` entries a rank."""
    traffic = [list(both) for both in gather_traffic(_evened_blocks(lengths, counts))]
    for owner, target, nbytes in _moves(lengths, counts):
        traffic[owner][0] += nbytes
        traffic[target][1] += nbytes
    return max(max(sent, received) for sent, received in traffic)


def direct_stages(
    problem: Problem, counts: Sequence[int], boundaries: Sequence[int]
) -> Iterator[Stage]:
    """Yield the stages of `gather_direct`."""
    blocks = _direct_blocks(problem.lengths, counts, boundaries)
    yield from _gather_stages(problem, blocks, sum(counts))


def evened_stages(problem: Problem, counts: Sequence[int]) -> Iterator[Stage]:
    """Yield the stages of `gather_evened`."""
    moves = _moves(problem.lengths, counts)
    sends = tuple(nbytes for owner, _, nbytes in moves if owner == problem.rank)
    receives = tuple(nbytes for _, target, nbytes in moves if target == problem.rank)
    if sends or receives:
        yield Work("encode", sum(sends))
        yield Exchange("rotate", sends, receives)
    yield from _gather_stages(problem, _evened_blocks(problem.lengths, counts), sum(counts))


def blocks_stages(
    problem: Problem, counts: Sequence[int], boundaries: Sequence[int]
) -> Iterator[Stage]:
    """Yield the stages of `gather_blocks`, with the blocks evened out if that pays."""
    if evening_pays(problem.lengths, counts, boundaries):
        yield from evened_stages(problem, counts)
    else:
        yield from direct_stages(problem, counts, boundaries)


def _gather_stages(problem: Problem, blocks: Sequence[float], entries: int) -> Iterator[Stage]:
    yield Work("encode", blocks[problem.rank])
    yield from gather_stages(blocks, problem.rank, max(blocks))
    yield copied(entries / problem.ranks, times=problem.ranks)


def _moves(lengths: Lengths, counts: Sequence[int]) -> list[tuple[int, int, float]]:
    """Return owner, target and bytes of each move to another rank."""
    return [
        (owner, target, lengths.sparse_message(stop - start))
        for start, stop, owner, target in moves_to_even(counts)
        if owner != target
    ]


def _direct_blocks(
    lengths: Lengths, counts: Sequence[int], boundaries: Sequence[int]
) -> list[float]:
    """Return the bytes of each rank's message in `gather_direct`."""
    sizes = [stop - start for start, stop in pairwise(boundaries)]
    return [lengths.region_message(nnz, size) for nnz, size in zip(counts, sizes, strict=True)]


def _evened_blocks(lengths: Lengths, counts: Sequence[int]) -> list[float]:
    """Return the bytes of each rank's message in `gather_evened`, after evening out."""
    cuts = patterns.regions(sum(counts), len(counts))
    return [lengths.sparse_message(stop - start) for start, stop in pairwise(cuts)]
