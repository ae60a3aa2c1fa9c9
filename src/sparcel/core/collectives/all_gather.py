"""All-gather: every rank receives the streams of all ranks, and may reduce them by itself."""

from __future__ import annotations

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
