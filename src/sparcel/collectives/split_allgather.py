"""All-reduce for large data: owners reduce their regions, then all ranks gather the regions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from sparcel import patterns
from sparcel.collectives.reduce_scatter import reduce_regions
from sparcel.collectives.reduce_scatter import stages as reduce_scatter_stages
from sparcel.formats import Expected
from sparcel.ops import SUM, Op
from sparcel.stages import Problem, Stage, Work, copied, gather_stages
from sparcel.stream import SparseStream
from sparcel.wire import Wire, collective


@collective
def split_allgather(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks in two phases.

    An owner knows the exact count of its reduced region and sends it as that takes the fewest
    bytes: see `Wire.pack_region`. This combines SSAR and DSAR, without guessing the result's
    density.

    Words a rank: at most 2k, then at most 2K(P−1)/P if the K coordinates of the result are spread
    evenly, and never more than n(P−1)/P and a bit for each coordinate.
    Source: SparCML, sections 5.3.2 and 5.3.3 (SSAR_Split_allgather, DSAR_Split_allgather). A format
    of few bits rounds in both phases: the values on their way to the owners, and the sums. Section
    6 rounds the second phase of DSAR alone, dense sums.
    """
    boundaries = patterns.regions(stream.size, wire.size)
    own = reduce_regions(stream, boundaries, wire, op, max_nnz)
    region = wire.pack_region(own, boundaries[wire.rank])
    bound = None if max_nnz is None else max_nnz * wire.size
    expected = [Expected.like(stream, bound, stop - start) for start, stop in pairwise(boundaries)]
    return wire.concatenate(wire.gather(region, expected), op)


def stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of `split_allgather`."""
    everyone, ranges = problem.everyone, list(pairwise(problem.regions))
    yield from reduce_scatter_stages(problem, problem.regions)
    blocks = [problem.region_message(everyone, lo, hi) for lo, hi in ranges]
    at_most = max(problem.most_bytes(problem.k * problem.ranks, hi - lo) for lo, hi in ranges)
    total = problem.entries(everyone)
    yield Work("encode", blocks[problem.rank])
    yield from gather_stages(blocks, problem.rank, at_most)
    yield copied(total / problem.ranks, times=problem.ranks)
    yield copied(total)
