"""All-reduce around a ring: regions gather contributions, then travel on to everybody."""

from __future__ import annotations

from sparcel.collectives._transfer import exchange_streams, region_boundaries
from sparcel.comm import Communicator
from sparcel.ops import SUM, Op
from sparcel.stream import SparseStream, concatenate, reduce


def ring(
    stream: SparseStream, comm: Communicator, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks, talking to the two neighbours alone.

    In step s of the first half rank r passes on region r−s, to which it has added its own slice;
    after P−1 steps it holds region r+1 complete, which the second half hands round.

    Rounds: 2(P−1). Words a rank: at most 2k(P−1) in the first half (fill-in), 2K(P−1)/P in the
    second for a result of K coordinates spread evenly.
    Source: SparCML, section 8.1 (the ring that Figure 3 compares with).
    """
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts = stream.compact(op).split(region_boundaries(stream.size, comm.size))
    parts = [part.compact(op) for part in parts]
    bound = None if max_nnz is None else max_nnz * comm.size
    for step in range(2 * (comm.size - 1)):
        leaving, arriving = (comm.rank - step) % comm.size, (comm.rank - step - 1) % comm.size
        own = parts[arriving]
        came = exchange_streams({after: parts[leaving]}, {before: own}, comm, bound)[before]
        parts[arriving] = reduce([came, own], op) if step < comm.size - 1 else came
    return concatenate(parts, op)
