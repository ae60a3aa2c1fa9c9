"""Ok-Topk into the owners' memory: what does not win stays where its parts meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sparcel import kernels
from sparcel.collectives._blocks import placed
from sparcel.collectives._global_topk import global_topk
from sparcel.collectives.oktopk import (
    blocks_steps,
    boundaries_steps,
    evening_pays,
    expected_course,
    gather_blocks,
    problem_of,
    winners_steps,
)
from sparcel.collectives.reduce_scatter import reduce_regions
from sparcel.collectives.reduce_scatter import steps as reduce_steps
from sparcel.ops import SUM
from sparcel.schedule import Problem, Step, Work
from sparcel.stream import SparseStream
from sparcel.wire import Wire

READING = 0.5
"""Time to select from a vector, divided by that of adding to it as well."""


@dataclass(frozen=True)
class HeldTopk:
    """The largest coordinates of all regions, and what this rank's region gained and lost.

    ``total`` is sparse and the same on all ranks, not ``finite`` if a region is not. ``arrived`` is
    the sum of what was sent for the region, and ``released`` is what was taken out of it.
    """

    total: SparseStream
    arrived: SparseStream
    released: SparseStream


def oktopk_held(
    stream: SparseStream,
    held: Tensor,
    boundaries: Sequence[int],
    wire: Wire,
    k: int,
    max_nnz: int | None = None,
) -> HeldTopk:
    """Add every rank's stream to the regions that the ranks hold, and take the k largest out.

    Parameters
    ----------
    stream
        Sparse, scalar float values: what this rank sends, at most ``max_nnz`` entries.
    held
        ``[boundaries[rank + 1] - boundaries[rank]]``, the stream's dtype: this rank's region. It is
        changed in place, and meaningless if the total is not finite.
    boundaries
        P+1, the same on all ranks: rank r owns ``[boundaries[r], boundaries[r + 1])``.
    k
        min(k, nonzeros of all regions) coordinates are taken; ties go to the lowest index.

    Rounds and words are those of `topk_by_regions`, without the sum of counts for the boundaries.
    Ranks do not compare this call, because each has another tensor; schemes call it in a step.
    """
    arrived = reduce_regions(stream, boundaries, wire, max_nnz=max_nnz)
    if arrived.indices is None:
        held.add_(arrived.values)
    else:
        kernels.scatter_reduce(held, arrived.indices, arrived.values, SUM)
    winners = global_topk(held, wire.comm, k, stream.size, arrived.finite)
    if not winners.finite:
        return HeldTopk(stream.void_like(), arrived, stream.void_like())
    indices, values = kernels.topk(held, winners.counts[wire.rank])
    kernels.scatter(held, indices, values.new_zeros(values.numel()))
    block = SparseStream.unchecked(indices, values, held.numel())
    evened = evening_pays(problem_of(stream, wire), winners.counts, boundaries)
    total = gather_blocks(block, winners.counts, boundaries, wire, evened)
    return HeldTopk(total, arrived, placed(block, boundaries[wire.rank], stream.size))


def steps(problem: Problem) -> Iterator[Step]:
    """Yield the expected steps of boundaries and `oktopk_held`.

    A rank sends its k entries to the other ranks alone.
    """
    course, ranks = expected_course(problem), problem.ranks
    region = problem.size / ranks
    sending = replace(problem, k=min(problem.size, problem.k * ranks // max(1, ranks - 1)))
    yield from boundaries_steps(problem, course)
    yield from reduce_steps(sending, course.boundaries)
    yield Work("scatter", problem.entries(problem.everyone) / ranks)
    yield from winners_steps(problem, course, region)
    yield Work("select", region, times=READING)
    yield from blocks_steps(problem, course)
