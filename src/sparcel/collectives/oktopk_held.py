"""Ok-Topk that adds to what the owners hold, where what does not win stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparcel import kernels
from sparcel.collectives._blocks import blocks_stages, evening_pays, gather_blocks
from sparcel.collectives._global_topk import global_topk, winners_stages
from sparcel.collectives.oktopk import SMALL, Course, problem_of
from sparcel.collectives.reduce_scatter import reduce_regions
from sparcel.collectives.reduce_scatter import stages as reduce_stages
from sparcel.comm import Call
from sparcel.ops import SUM
from sparcel.profiling import timed
from sparcel.stages import Problem, Stage, Work, scattered
from sparcel.stream import SparseStream
from sparcel.wire import Wire

SELECT_ONLY = 0.5
"""Time to select from a vector, divided by the time to add a gradient and select at once. At 0.1 %
it is 3.0 of 5.8 ms in docs/how-to/benchmark.md."""


@dataclass(frozen=True)
class HeldTopk:
    """The largest coordinates of all regions, and what came to this rank's region and left it.

    ``total`` is sparse and the same on all ranks, and not ``finite`` if a region is not; the other
    two are then meaningless. ``arrived`` is numbered from the region's start, and may be dense;
    ``released`` is a sparse stream of the whole vector.
    """

    total: SparseStream
    arrived: SparseStream
    released: SparseStream


def oktopk_held(
    stream: SparseStream,
    held: Tensor,
    own: SparseStream,
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
    held, own
        This rank's region: ``[boundaries[rank + 1] - boundaries[rank]]``, the stream's dtype, and a
        sparse stream of that size, which is added to it.
    boundaries
        P+1, the same on all ranks: rank r owns ``[boundaries[r], boundaries[r + 1])``.
    k
        min(k, nonzeros of all regions) coordinates are taken; ties go to the lowest index.

    Rounds are those of `topk_by_regions`, without the sum of counts for the boundaries. An owner
    receives all that the other ranks send of its region; the caller's boundaries bound that.
    """
    facts = {
        "k": k,
        "max_nnz": max_nnz,
        "boundaries": tuple(boundaries),
        "size": stream.size,
        "dtype": stream.dtype,
        "format": wire.format,
    }

    def add_and_take() -> HeldTopk:
        start, size = boundaries[wire.rank], stream.size
        arrived = reduce_regions(stream, boundaries, wire, max_nnz=max_nnz)
        sums = held.clone()
        for part in (own, arrived):
            if part.indices is None:
                sums.add_(part.values)
            else:
                kernels.scatter_reduce(sums, part.indices, part.values, SUM)
        winners = global_topk(sums, wire.comm, k, size, arrived.finite)
        if not winners.finite:
            return HeldTopk(stream.void_like(), arrived, stream.empty_like())
        indices, values = timed("select")(kernels.topk)(sums, winners.counts[wire.rank])
        block = SparseStream.unchecked(indices, values, sums.numel())
        evened = evening_pays(problem_of(stream, wire), winners.counts, boundaries)
        total = gather_blocks(block, winners.counts, boundaries, wire, evened)
        return HeldTopk(total, arrived, block.placed(start, size))

    return wire.comm.call(Call.of("oktopk_held", facts), add_and_take)


def stages(problem: Problem, course: Course) -> Iterator[Stage]:
    """Yield the stages of `oktopk_held` with this ``course``."""
    region = course.boundaries[problem.rank + 1] - course.boundaries[problem.rank]
    yield Work("small", SMALL)
    yield from reduce_stages(problem, course.boundaries)
    yield Work("add", region)  # the copy of what is held
    yield scattered(problem.entries(problem.everyone) / problem.ranks)
    yield from winners_stages(problem, region, course.histograms, course.listed)
    yield Work("select", region, times=2 * SELECT_ONLY)  # what may win, and what wins
    yield from blocks_stages(problem, course.winners, course.boundaries)
