"""The global top-k of the ranks' streams, by a tree of pairwise sums and selections."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel import formats
from sparcel._checks import all_finite
from sparcel.collectives._transfer import (
    broadcast_message,
    decode_from,
    exchange_streams,
    stream_bytes,
)
from sparcel.collectives.allgather import allgather
from sparcel.comm import Communicator
from sparcel.stream import SparseStream, reduce


@dataclass(frozen=True)
class GlobalTopk:
    """The outcome of `gtopk`.

    ``total`` holds at most k coordinates, sparse, the same on all ranks; ``dropped`` the partial
    sums that this rank left out on the way: over all ranks the two add up to the sum of all
    inputs. Neither is finite where a partial sum overflowed.
    """

    total: SparseStream
    dropped: SparseStream


def gtopk(stream: SparseStream, comm: Communicator, k: int) -> GlobalTopk:
    """Sum pairs of streams up a tree, keep the k largest of each sum, and broadcast the root's.

    Parameters
    ----------
    stream
        Scalar float values; all but the k largest are dropped before the first round.

    Rounds: 2⌈log₂P⌉. Words: at most 2k⌈log₂P⌉ each way, at the root.
    Source: gTop-k, Definition 1 (⊤) and Algorithm 3 (gTopKAllReduce); any P here, where the paper
    has powers of two. What a rank drops it reports, where the paper forgets the partial sum.
    """
    total, rest = stream.topk(k)
    dropped = [rest]
    distance = 1
    while distance < comm.size and comm.rank % distance == 0:
        if comm.rank % (2 * distance):
            exchange_streams({comm.rank - distance: total.compact()}, {}, comm, k)
        elif comm.rank + distance < comm.size:
            child = comm.rank + distance
            arrived = exchange_streams({}, {child: total}, comm, k)[child]
            pair = reduce([total, arrived])
            pair.finite = pair.finite and all_finite(pair.values)
            total, rest = pair.topk(k)
            dropped.append(rest)
        distance *= 2
    message = formats.encode(total.compact()) if comm.rank == 0 else None
    message = broadcast_message(message, comm, 0, stream_bytes(stream, k))
    total = decode_from(0, message, stream, comm)
    if total.is_dense:
        total = total.largest(k)
    return GlobalTopk(total, reduce(dropped))


def gathered_topk(
    stream: SparseStream, comm: Communicator, k: int, max_nnz: int | None = None
) -> SparseStream:
    """Gather every rank's stream, sum in the order of the ranks, and keep the k largest.

    The result is the exact global top-k, which `oktopk` finds without gathering; sparse, empty
    and not ``finite`` where an input or the sum was not. ``max_nnz`` bounds every rank's entries.

    Rounds: ⌈log₂P⌉. Words a rank: 2(P−1) times the entries of a rank.
    Source: gTop-k, Algorithm 2.
    """
    total = allgather(stream, comm, max_nnz=max_nnz)
    if not (total.finite and all_finite(total.values)):
        void = stream.empty_like()
        void.finite = False
        return void
    return total.largest(k)
