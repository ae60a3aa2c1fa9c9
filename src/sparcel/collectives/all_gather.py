"""Every rank's stream to every rank."""

from __future__ import annotations

from sparcel import formats
from sparcel.collectives._transfer import decode_from, gather_messages
from sparcel.comm import Communicator
from sparcel.formats import coo
from sparcel.stream import SparseStream


def all_gather(stream: SparseStream, comm: Communicator) -> list[SparseStream]:
    """Return the streams of all ranks as they are, by rank; size, dtype and width must agree.

    Rounds: ⌈log₂P⌉. A rank receives the P−1 other streams, and sends as many (Bruck's pattern).
    Source: SparCML, section 5.2 (allgather).
    """
    # Nothing is made dense to save bytes: what is absent would become an explicit zero.
    largest = coo.message_bytes(stream.size, stream.size, stream.dtype, stream.width)
    return gather_streams(stream, comm, largest)


def gather_streams(stream: SparseStream, comm: Communicator, at_most: int) -> list[SparseStream]:
    """Gather streams whose messages have at most that many bytes."""
    messages = gather_messages(formats.encode(stream), comm, at_most)
    return [decode_from(rank, message, stream, comm) for rank, message in enumerate(messages)]
