"""Every rank's stream to every rank."""

from __future__ import annotations

from sparcel import formats
from sparcel.collectives._transfer import decode_from, gather_messages, stream_bytes
from sparcel.comm import Communicator
from sparcel.stream import SparseStream


def all_gather(
    stream: SparseStream, comm: Communicator, max_nnz: int | None = None
) -> list[SparseStream]:
    """Return the streams of all ranks, by rank; sizes, dtypes and widths must agree.

    Rounds: ⌈log₂P⌉. A rank receives the P−1 other streams, and sends as many (Bruck's pattern).
    Source: SparCML, section 5.2 (allgather).
    """
    at_most = stream_bytes(stream, max_nnz)
    messages = gather_messages(formats.encode(stream.compact()), comm, at_most)
    return [
        stream if rank == comm.rank else decode_from(rank, message, stream, comm)
        for rank, message in enumerate(messages)
    ]
