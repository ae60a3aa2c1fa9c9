"""All-reduce by gathering every rank's stream and reducing them locally."""

from __future__ import annotations

from sparcel import formats
from sparcel.collectives._transfer import gather_messages, reduce_messages, stream_bytes
from sparcel.comm import Communicator
from sparcel.ops import SUM, Op
from sparcel.stream import SparseStream


def allgather(
    stream: SparseStream, comm: Communicator, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks; every rank reduces all P streams, in the order of the ranks.

    Rounds: ⌈log₂P⌉. Words a rank: 2k(P−1). The best where indices hardly overlap and P is small.
    Source: gTop-k, Algorithm 1 (TopKAllReduce); SparCML, section 5.3, case (1).
    """
    at_most = stream_bytes(stream, max_nnz)
    own = stream.compact(op)
    messages = gather_messages(formats.encode(own), comm, at_most)
    return reduce_messages(dict(enumerate(messages)), own, comm, op)
