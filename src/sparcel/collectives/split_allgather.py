"""All-reduce for large data: owners reduce their regions, then all ranks gather the regions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from sparcel import patterns
from sparcel._checks import all_finite
from sparcel.collectives.reduce_scatter import reduce_scatter
from sparcel.collectives.reduce_scatter import steps as reduce_scatter_steps
from sparcel.formats import Qsgd
from sparcel.ops import SUM, Op
from sparcel.schedule import Problem, Step, Work
from sparcel.stream import SparseStream
from sparcel.wire import Due, Wire, collective, gather_steps


@dataclass(frozen=True)
class Quantized:
    """The result of a quantised all-reduce: the sum, the same on all ranks, and its error.

    ``error`` is the exact minus the quantised sum of this rank's region, dense. The region begins
    at coordinate ``start``. ``error`` is None if the region was not quantised.
    """

    total: SparseStream
    start: int
    error: Tensor | None


@collective
def split_allgather(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks in two phases.

    An owner knows the exact count of its reduced region and sends it sparse or dense, whichever is
    smaller. This combines SSAR and DSAR, without guessing the result's density.

    Rounds: P−1 + ⌈log₂P⌉. Words a rank: at most 2k, then at most 2K(P−1)/P if the K coordinates
    of the result are spread evenly, and never more than n(P−1)/P.
    Source: SparCML, sections 5.3.2 and 5.3.3 (SSAR_Split_allgather, DSAR_Split_allgather).
    """
    region = reduce_scatter(stream, wire, op, max_nnz)
    return wire.concatenate(_gather_regions(wire.encode(region), stream, wire, max_nnz), op)


@collective
def quantized_split_allgather(
    stream: SparseStream, wire: Wire, quantizer: Qsgd, max_nnz: int | None = None
) -> Quantized:
    """Sum over all ranks; the second phase quantises regions that became dense.

    Pass a ``quantizer`` with a new seed for every call.

    Source: SparCML, section 6 (quantisation in DSAR's dense phase alone).
    """
    region = reduce_scatter(stream, wire, SUM, max_nnz)
    start = patterns.regions(stream.size, wire.size)[wire.rank]
    message, error = quantizer.encode(region, start)
    if error is not None and not all_finite(error):  # an overflowed sum must not enter memory
        region.finite = False
        message, error = quantizer.encode(region, start)
    regions = _gather_regions(message, stream, Wire(wire.comm, quantizer), max_nnz)
    return Quantized(wire.concatenate(regions), start, error)


def _gather_regions(
    message: Tensor, like: SparseStream, wire: Wire, max_nnz: int | None
) -> list[SparseStream]:
    """Gather the owners' messages, in the wire's format, and return the decoded regions."""
    bound = None if max_nnz is None else max_nnz * wire.size
    boundaries = patterns.regions(like.size, wire.size)
    dues = [Due.like(like, bound, stop - start) for start, stop in pairwise(boundaries)]
    return wire.gather_messages(message, dues)


def steps(problem: Problem) -> Iterator[Step]:
    """Yield the steps of `split_allgather`."""
    everyone, ranges = problem.everyone, list(pairwise(problem.regions))
    yield from reduce_scatter_steps(problem)
    blocks = [problem.message(problem.stored(everyone, lo, hi), hi - lo) for lo, hi in ranges]
    at_most = max(problem.most_bytes(problem.k * problem.ranks, hi - lo) for lo, hi in ranges)
    total = problem.entries(everyone)
    yield Work("encode", blocks[problem.rank])
    yield from gather_steps(blocks, problem.rank, at_most)
    yield Work("decode", total / problem.ranks, times=problem.ranks)
    yield Work("join", total)
