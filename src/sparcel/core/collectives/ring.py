"""All-reduce around a ring: regions collect contributions, then travel on to all ranks."""

from __future__ import annotations

from sparcel.core import patterns
from sparcel.core.formats import Expected
from sparcel.core.ops import SUM, Op
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire, collective


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
