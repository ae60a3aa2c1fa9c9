"""All-reduce for small data: partners exchange all they have, at doubling distances."""

from __future__ import annotations

from sparcel import formats
from sparcel.collectives._transfer import exchange_streams, reduce_messages, stream_bytes
from sparcel.comm import Communicator
from sparcel.ops import SUM, Op
from sparcel.stream import SparseStream, reduce


def recursive_doubling(
    stream: SparseStream, comm: Communicator, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks with the fewest rounds.

    With Q the largest power of two up to P, the P−Q ranks from Q on first fold their streams into
    those of ranks 0 … P−Q−1 and in the end get the result from them.

    Rounds: ⌊log₂P⌋, and 2 more when P is no power of two. Words a rank: from 2k·log₂P (identical
    indices) to 2k(P−1) (disjoint ones), and the folding's.
    Source: SparCML, section 5.3.1 (SSAR_Recursive_double) and appendix A.
    """
    powers = 1 << (comm.size.bit_length() - 1)
    extras = comm.size - powers
    total = stream.compact(op)
    bound = max_nnz

    if comm.rank >= powers:
        exchange_streams({comm.rank - powers: total}, {}, comm, bound)
    elif comm.rank < extras:
        folded = comm.rank + powers
        arrived = exchange_streams({}, {folded: total}, comm, bound)
        total = reduce([total, arrived[folded]], op)
    if extras and bound is not None:
        bound *= 2

    distance = 1
    while distance < powers and comm.rank < powers:
        peer = comm.rank ^ distance
        message = formats.encode(total)
        messages = comm.exchange({peer: message}, {peer: stream_bytes(total, bound)})
        # Both partners put the lower ranks first, so that both compute the same bits.
        total = reduce_messages({comm.rank: message, **messages}, total, comm, op)
        distance *= 2
        bound = None if bound is None else 2 * bound

    if comm.rank >= powers:
        source = comm.rank - powers
        bound = None if max_nnz is None else max_nnz * comm.size
        return exchange_streams({}, {source: total}, comm, bound)[source]
    if comm.rank < extras:
        exchange_streams({comm.rank + powers: total}, {}, comm, bound)
    return total
