"""All-reduce in few rounds whose volume does not grow with the ranks."""

from __future__ import annotations

from sparcel.collectives._transfer import exchange_streams, region_boundaries
from sparcel.comm import Communicator
from sparcel.ops import SUM, Op
from sparcel.stream import SparseStream, concatenate, reduce


def halving_doubling(
    stream: SparseStream, comm: Communicator, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks: partners share the work on ever smaller halves, then join them.

    With Q the largest power of two up to P, the P−Q ranks from Q on first fold their streams into
    those of ranks 0 … P−Q−1 and in the end get the result from them.

    Rounds: 2⌊log₂P⌋, and 2 more when P is no power of two. Words a rank: 2n(Q−1)/Q for dense
    streams; for sparse ones at most the fill-in of half the result in the last round of the first
    half; and the folding's.
    Source: Rabenseifner's algorithm, as in Thakur, Rabenseifner and Gropp 2005, section 4.4.
    """
    powers = 1 << (comm.size.bit_length() - 1)
    extras = comm.size - powers
    total = stream.compact(op)
    if comm.rank >= powers:
        partner = comm.rank - powers
        exchange_streams({partner: total}, {}, comm, max_nnz)
        return exchange_streams({}, {partner: total}, comm, None)[partner]
    if comm.rank < extras:
        partner = comm.rank + powers
        arrived = exchange_streams({}, {partner: total}, comm, max_nnz)
        total = reduce([total, arrived[partner]], op)
    bound = None if max_nnz is None else max_nnz * (2 if extras else 1)
    total = _double(_halve(total, powers, comm, op, bound), stream, powers, comm, op)
    if comm.rank < extras:
        exchange_streams({comm.rank + powers: total}, {}, comm, None)
    return total


def _halve(
    total: SparseStream, powers: int, comm: Communicator, op: Op, bound: int | None
) -> SparseStream:
    """Return this rank's region of the sum over the first ``powers`` ranks.

    In each round partners send each other the half that the other one goes on with.
    """
    boundaries = region_boundaries(total.size, powers)
    distance = powers // 2
    while distance:
        peer = comm.rank ^ distance
        first = comm.rank & -2 * distance  # the group of 2·distance ranks shares one range
        start, middle, stop = boundaries[first : first + 2 * distance + 1 : distance]
        halves = [part.compact(op) for part in total.split([0, middle - start, stop - start])]
        keep, give = halves if comm.rank < peer else halves[::-1]
        arrived = exchange_streams({peer: give}, {peer: keep}, comm, bound)[peer]
        # The lower ranks go first, as in `recursive_doubling`.
        total = reduce([keep, arrived] if comm.rank < peer else [arrived, keep], op).compact(op)
        bound = None if bound is None else 2 * bound
        distance //= 2
    return total


def _double(
    total: SparseStream, like: SparseStream, powers: int, comm: Communicator, op: Op
) -> SparseStream:
    """Join the regions of the first ``powers`` ranks: partners exchange all they have."""
    boundaries = region_boundaries(like.size, powers)
    distance = 1
    while distance < powers:
        peer = comm.rank ^ distance
        first = peer & -distance
        due = like.empty_like(boundaries[first + distance] - boundaries[first])
        arrived = exchange_streams({peer: total}, {peer: due}, comm, None)[peer]
        total = concatenate([total, arrived] if comm.rank < peer else [arrived, total], op)
        distance *= 2
    return total
