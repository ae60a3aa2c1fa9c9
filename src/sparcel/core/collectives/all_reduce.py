"""All-gather, reduce-scatter, and the all-reduces by these, by the engine, and around a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sparcel.core import patterns
from sparcel.core.device import all_of
from sparcel.core.formats import Expected
from sparcel.core.ops import SUM, Op
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire, collective

SLICE = 1 << 20
"""Coordinates of a slice of `sum_regions`."""


@collective
def all_gather(stream: SparseStream, wire: Wire, max_nnz: int | None = None) -> list[SparseStream]:
    """Return a list of the streams of all ranks; size, dtype and width must agree.

    Sparse streams are never made dense, because absent coordinates would become explicit zeros.
    ``max_nnz`` bounds the entries of each; if they are few, few ranks send them straight to all.

    A rank receives the P−1 other streams and sends P−1 streams: see `Wire.gather_messages`.
    Source: SparCML, section 5.2 (allgather).
    """
    expected = [Expected.like(stream, max_nnz, stays_sparse=True)] * wire.size
    return wire.gather(wire.pack(stream), expected)


@collective
def allgather(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks; every rank reduces all P streams, in the order of the ranks.

    Words a rank: 2k(P−1). Best if indices hardly overlap and P is small.
    Source: gTop-k, Algorithm 1 (TopKAllReduce); SparCML, section 5.3, case (1).
    """
    total = wire.gather_and_reduce(wire.compact(stream, op), max_nnz, op)
    return wire.compact(total, op)


@collective
def dense(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks with the engine's own all-reduce; ``max_nnz`` is ignored.

    `check_agreement` comes first. Words a rank: 2n(P−1)/P for a ring.
    """
    finite = check_agreement(stream, wire)
    fill = op.neutral_for(stream.dtype)
    total = stream.values.clone() if stream.is_dense else stream.to_dense(fill)
    wire.comm.all_reduce(total, op)
    return SparseStream.unchecked(None, total, stream.size, finite)


def check_agreement(stream: SparseStream, wire: Wire) -> bool | Tensor:
    """Compare the ranks' headers, because the engine may hang or crash if sizes differ.

    Returns whether the streams of all ranks are finite.

    Raises
    ------
    MismatchError
        When sizes, dtypes or widths differ.
    """
    empty, wire = stream.empty_like(), wire.exact
    streams = wire.gather(wire.pack(empty), [Expected.like(empty, max_nnz=0)] * wire.size)
    return all_of([other.finite for other in streams])


@collective
def reduce_scatter(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Return this rank's region of the reduced stream, numbered from the region's start.

    Rank r owns ``[r·n // P, (r+1)·n // P)``. Every rank sends each owner its slice directly. Each
    rank starts with a different owner, so that no owner receives all first messages. Owners reduce
    in the order of the ranks.

    Words a rank: at most 2k sent.
    Source: SparCML, section 5.3.2 (the split phase).
    """
    boundaries = patterns.cuts(stream.size, wire.size)
    return wire.compact(reduce_regions(stream, boundaries, wire, op, max_nnz), op)


def reduce_regions(
    stream: SparseStream,
    boundaries: Sequence[int],
    wire: Wire,
    op: Op = SUM,
    max_nnz: int | None = None,
) -> SparseStream:
    """Return this rank's region of the reduced stream, for any boundaries, as `Wire.reduce` does.

    Rank r owns ``[boundaries[r], boundaries[r + 1])``; all ranks pass the same P+1 boundaries.
    """
    parts = stream.split(boundaries)
    rounds = patterns.rotation(wire.rank, wire.size)
    sends = {owner: wire.pack_region(parts[owner], boundaries[owner]) for owner, *_ in rounds}
    sources = [source for _, source, *_ in rounds]
    return wire.exchange_and_reduce(parts[wire.rank], sends, sources, max_nnz, op)


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
    boundaries = patterns.cuts(stream.size, wire.size)
    own = reduce_regions(stream, boundaries, wire, op, max_nnz)
    region = wire.pack_region(own, boundaries[wire.rank])
    bound = None if max_nnz is None else max_nnz * wire.size
    expected = [Expected.like(stream, bound, stop - start) for start, stop in pairwise(boundaries)]
    return wire.concatenate(wire.gather(region, expected), op)


@collective
def ring(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks; each rank exchanges only with its two neighbours.

    In step s of the first half, rank r sends on region r−s, which includes its own slice. After
    P−1 steps rank r holds the complete sum of region r+1. In the second half the complete regions
    travel around the ring.

    Words a rank: at most 2k(P−1) in the first half (fill-in), 2K(P−1)/P in the
    second for a result of K coordinates spread evenly.
    Source: SparCML, section 8.1 (the ring that Figure 3 compares with).
    """
    rank, ranks = wire.rank, wire.size
    boundaries = patterns.cuts(stream.size, ranks)
    parts = stream.split(boundaries)
    bound = None if max_nnz is None else max_nnz * ranks
    for step, (after, before, *_) in enumerate(patterns.ring(rank, ranks)):
        leaving, arriving = (rank - step) % ranks, (rank - step - 1) % ranks
        packet, own = wire.pack_region(parts[leaving], boundaries[leaving]), parts[arriving]
        came = wire.exchange({after: packet}, {before: Expected.like(own, bound)})[before]
        parts[arriving] = wire.reduce([came.stream, own], op)
    complete = (rank + 1) % ranks
    packet = wire.pack_region(parts[complete], boundaries[complete])
    parts[complete] = packet.stream
    for step, (after, before, *_) in enumerate(patterns.ring(rank, ranks)):
        arriving = (rank - step) % ranks
        coming = {before: Expected.like(parts[arriving], bound)}
        packet = wire.exchange({after: packet}, coming)[before]
        parts[arriving] = packet.stream
    return wire.concatenate(parts, op)


def sum_regions(vector: Tensor, wire: Wire, dtype: torch.dtype, wired: torch.dtype) -> Tensor:
    """Return this rank's region of the sum of dense vectors, as `reduce_scatter` divides them.

    The vectors travel in the dtype ``wired`` and are added in ``dtype``, which may be wider. They
    do so slice by slice, since messages as large as the vector would take fresh memory in each
    step. A rank alone gets its vector back, or a wider copy.
    """
    if wire.size == 1:
        return vector.to(dtype)
    boundaries = patterns.cuts(vector.numel(), wire.size)
    rounds, own = patterns.rotation(wire.rank, wire.size), boundaries[wire.rank]
    total = vector.new_empty(boundaries[wire.rank + 1] - own, dtype=dtype)
    for places in _slices(boundaries):
        parts = [
            SparseStream.unchecked(None, vector[lo:hi].to(wired), hi - lo) for lo, hi in places
        ]
        packets = wire.exchange(
            {owner: wire.pack(parts[owner]) for owner, *_ in rounds},
            {source: Expected.like(parts[wire.rank]) for _, source, *_ in rounds},
        )
        streams = {rank: packet.stream for rank, packet in packets.items()}
        streams[wire.rank] = parts[wire.rank]
        start, stop = places[wire.rank]
        region = total[start - own : stop - own].copy_(streams[0].values)
        for rank in range(1, wire.size):
            region.add_(streams[rank].values)
    return total


def _slices(boundaries: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield a slice ``[start, stop)`` of each region, until none has anything left."""
    longest = max(stop - start for start, stop in pairwise(boundaries))
    for begin in range(0, longest, SLICE):
        yield [
            (min(start + begin, stop), min(start + begin + SLICE, stop))
            for start, stop in pairwise(boundaries)
        ]
