"""All-reduce for large data: owners reduce their regions, then all ranks gather the regions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from sparcel import patterns
from sparcel.collectives.reduce_scatter import reduce_scatter
from sparcel.collectives.reduce_scatter import stages as reduce_scatter_stages
from sparcel.formats import Expected, Qsgd
from sparcel.ops import SUM, Op
from sparcel.stages import Problem, Stage, Work, copied
from sparcel.stream import SparseStream
from sparcel.wire import Wire, collective, gather_stages


@dataclass(frozen=True)
class Quantized:
    """The result of a quantised all-reduce: the sum, the same on all ranks, and what it lacks.

    ``lost`` is what this rank rounded away, over the whole vector: of its values in the regions of
    other ranks, and of the sum in its own region. The sum plus all ranks' ``lost`` is exact.
    """

    total: SparseStream
    lost: SparseStream


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
    """Sum over all ranks; both phases quantise what they send, sparse or dense.

    Pass a ``quantizer`` with a new seed for every call. A rank's values in its own region do not
    travel and are not rounded before they are summed. Each rank rounds by random numbers of its
    own, so that the ranks' errors do not add up.

    Source: SparCML, Algorithm 1 (the values of each rank, as in section 8.3) and section 6 (the
    sum).
    """
    narrow = Wire(wire.comm, quantizer)
    region, lost = _reduce_quantized(stream, narrow, quantizer, max_nnz)
    start = patterns.regions(stream.size, wire.size)[wire.rank]
    message, error = quantizer.encode(region, start)
    lost[wire.rank] = error or region.empty_like()
    regions = _gather_regions(message, stream, narrow, max_nnz)
    return Quantized(wire.concatenate(regions), wire.concatenate(lost))


def _reduce_quantized(
    stream: SparseStream, wire: Wire, quantizer: Qsgd, max_nnz: int | None
) -> tuple[SparseStream, list[SparseStream]]:
    """Return this rank's region of the sum, and what rounding took from its part of each region."""
    boundaries = patterns.regions(stream.size, wire.size)
    parts = [wire.compact(part) for part in stream.split(boundaries)]
    own, lost = parts[wire.rank], [part.empty_like() for part in parts]
    rounds, sends = patterns.rotation(wire.rank, wire.size), {}
    first = (1 + wire.rank) * stream.size  # the numbers up to `size` round the sums
    for owner, *_ in rounds:
        sends[owner], error = quantizer.encode(parts[owner], first + boundaries[owner])
        lost[owner] = error or lost[owner]
    expected = Expected.like(own, max_nnz)
    receives = {source: wire.most_bytes(expected) for _, source, *_ in rounds}
    messages = wire.comm.exchange(sends, receives)
    streams = {rank: wire.decode(rank, message, expected) for rank, message in messages.items()}
    streams[wire.rank] = own
    return wire.reduce([streams[rank] for rank in range(wire.size)]), lost


def _gather_regions(
    message: Tensor, like: SparseStream, wire: Wire, max_nnz: int | None
) -> list[SparseStream]:
    """Gather the owners' messages, in the wire's format, and return the decoded regions."""
    bound = None if max_nnz is None else max_nnz * wire.size
    boundaries = patterns.regions(like.size, wire.size)
    expected = [Expected.like(like, bound, stop - start) for start, stop in pairwise(boundaries)]
    return wire.gather_messages(message, expected)


def stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of `split_allgather`."""
    everyone, ranges = problem.everyone, list(pairwise(problem.regions))
    yield from reduce_scatter_stages(problem)
    blocks = [problem.message(problem.stored(everyone, lo, hi), hi - lo) for lo, hi in ranges]
    at_most = max(problem.most_bytes(problem.k * problem.ranks, hi - lo) for lo, hi in ranges)
    total = problem.entries(everyone)
    yield Work("encode", blocks[problem.rank])
    yield from gather_stages(blocks, problem.rank, at_most)
    yield copied(total / problem.ranks, times=problem.ranks)
    yield copied(total)
