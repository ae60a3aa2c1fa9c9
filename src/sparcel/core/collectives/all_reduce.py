"""All-gather, and three all-reduces: by it, by the engine, and around a ring."""

from __future__ import annotations

from torch import Tensor

from sparcel.core import patterns
from sparcel.core.device import all_of
from sparcel.core.formats import Expected
from sparcel.core.ops import SUM, Op
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire, collective


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
