"""Each rank reduces one region of the index range: the split phase of larger algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sparcel import patterns
from sparcel.ops import SUM, Op
from sparcel.steps import Exchange, Problem, Step, Work, merge_all
from sparcel.stream import SparseStream
from sparcel.wire import Due, Wire, collective


@collective
def reduce_scatter(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Return this rank's region of the reduced stream, numbered from the region's start.

    Rank r owns ``[r·n // P, (r+1)·n // P)``. Every rank sends each owner its slice directly. Each
    rank starts with a different owner, so that no owner receives all first messages. Owners reduce
    in the order of the ranks.

    Rounds: P−1. Words a rank: at most 2k sent.
    Source: SparCML, section 5.3.2 (the split phase).
    """
    boundaries = patterns.regions(stream.size, wire.size)
    return reduce_regions(wire.compact(stream, op), boundaries, wire, op, max_nnz)


def reduce_regions(
    stream: SparseStream,
    boundaries: Sequence[int],
    wire: Wire,
    op: Op = SUM,
    max_nnz: int | None = None,
) -> SparseStream:
    """Return this rank's region of the reduced stream, like `reduce_scatter`, for any boundaries.

    Rank r owns ``[boundaries[r], boundaries[r + 1])``; all ranks pass the same P+1 boundaries.
    """
    parts = stream.split(boundaries)
    rounds = patterns.rotation(wire.rank, wire.size)
    sends = {owner: wire.compact(parts[owner], op) for owner, *_ in rounds}
    sources = [source for _, source, *_ in rounds]
    region = wire.exchange_and_reduce(parts[wire.rank], sends, sources, max_nnz, op)
    return wire.compact(region, op)


def sum_regions(vector: Tensor, wire: Wire, dtype: torch.dtype) -> Tensor:
    """Return this rank's region of the sum of dense vectors, as `reduce_scatter` divides them.

    The vectors travel in their own dtype and are added in ``dtype``, which may be wider.
    """
    parts = SparseStream.unchecked(None, vector, vector.numel()).split(
        patterns.regions(vector.numel(), wire.size)
    )
    rounds, own = patterns.rotation(wire.rank, wire.size), parts[wire.rank]
    arrived = wire.exchange(
        {owner: parts[owner] for owner, *_ in rounds},
        {source: Due.like(own) for _, source, *_ in rounds},
    )
    arrived[wire.rank] = own
    total = arrived[0].to_dense().to(dtype, copy=True)
    for rank in range(1, wire.size):
        total.add_(arrived[rank].to_dense())
    return total


def steps(problem: Problem, boundaries: Sequence[int] | None = None) -> Iterator[Step]:
    """Yield the steps of `reduce_regions`, or of `reduce_scatter` if ``boundaries`` is None."""
    boundaries = boundaries or problem.regions
    rank, ranks = problem.rank, problem.ranks

    def slice_of(sender: int, owner: int) -> float:
        start, stop = boundaries[owner], boundaries[owner + 1]
        return problem.message(problem.stored([sender], start, stop), stop - start)

    start, stop = boundaries[rank], boundaries[rank + 1]
    if ranks > 1:
        rounds = patterns.rotation(rank, ranks)
        sends = tuple(slice_of(rank, owner) for owner, *_ in rounds)
        receives = tuple(slice_of(source, rank) for _, source, *_ in rounds)
        yield Work("split", problem.k)
        yield Work("encode", max(*sends, *receives), times=ranks)
        yield Exchange("rotate", sends, receives)
    yield from merge_all(problem, start, stop)
