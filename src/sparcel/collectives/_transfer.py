"""What collectives share: streams to and from messages, and the two tree-like patterns."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sparcel import formats
from sparcel.comm import Communicator
from sparcel.errors import FormatError, MismatchError
from sparcel.ops import Op
from sparcel.stream import SparseStream, reduce


def decode_from(
    source: int, message: Tensor, like: SparseStream, comm: Communicator
) -> SparseStream:
    """Decode what rank ``source`` sent; errors name both ranks."""
    try:
        return formats.decode(message, like)
    except MismatchError as error:
        raise MismatchError(
            f"rank {source} sent rank {comm.rank} {error}; every rank must call with the same"
            " size, dtype and width"
        ) from None
    except FormatError as error:
        raise FormatError(f"rank {source} sent rank {comm.rank} a bad message: {error}") from None


def reduce_messages(
    messages: Mapping[int, Tensor], own: SparseStream, comm: Communicator, op: Op
) -> SparseStream:
    """Reduce the streams in messages, by rank; ``own`` is the one that this rank's holds."""
    ranks = sorted(messages)
    total = formats.reduce_messages([messages[rank] for rank in ranks], own, op)
    if total is not None:
        return total
    streams = [
        own if rank == comm.rank else decode_from(rank, messages[rank], own, comm) for rank in ranks
    ]
    return reduce(streams, op)


def stream_bytes(stream: SparseStream, max_nnz: int | None) -> int:
    """Return the most bytes of a message that holds a stream like this of ``max_nnz`` entries."""
    return formats.max_bytes(stream.size, stream.dtype, stream.width, max_nnz)


def exchange_streams(
    sends: Mapping[int, SparseStream],
    receives: Mapping[int, SparseStream],
    comm: Communicator,
    max_nnz: int | None,
) -> dict[int, SparseStream]:
    """Exchange streams of at most ``max_nnz`` entries.

    ``receives`` gives, for each source, any stream that is like the one due in size, dtype and
    width.
    """
    bounds = {source: stream_bytes(like, max_nnz) for source, like in receives.items()}
    received = comm.exchange(
        {rank: formats.encode(stream) for rank, stream in sends.items()}, bounds
    )
    return {
        source: decode_from(source, message, receives[source], comm)
        for source, message in received.items()
    }


DIRECT_RANKS, DIRECT_BYTES = 8, 256 << 10
"""Up to so many ranks, messages of up to so many bytes go straight to everyone."""


def gather_messages(message: Tensor, comm: Communicator, at_most: int) -> list[Tensor]:
    """Give every rank the message of every rank, by rank; ``at_most`` bounds the bytes of each.

    Few ranks send small messages to each other, all at once: to wait once costs less than to send
    fewer. Otherwise by Bruck's pattern, in ⌈log₂P⌉ rounds.
    """
    if comm.size <= DIRECT_RANKS and at_most <= DIRECT_BYTES:
        return comm.gather(message, at_most)
    return _gather_in_rounds(message, comm, at_most)


def _gather_in_rounds(message: Tensor, comm: Communicator, at_most: int) -> list[Tensor]:
    """Gather by the pattern of Bruck et al. 1997.

    Before round t a rank holds the messages of the 2^t ranks from itself upwards; it sends as many
    as its peer lacks to the rank 2^t below.
    """
    held = [message]
    distance = 1
    while distance < comm.size:
        count = min(distance, comm.size - distance)
        below, above = (comm.rank - distance) % comm.size, (comm.rank + distance) % comm.size
        arrived = comm.exchange_parts({below: held[:count]}, {above: count * at_most})[above]
        messages = [message for part in arrived for message in formats.decode_all(part)]
        if len(messages) != count:
            raise FormatError(
                f"rank {above} sent rank {comm.rank} {len(messages)} messages in one, where"
                f" {count} were due; every rank must call the same collective"
            )
        held += messages
        distance *= 2
    return [held[(rank - comm.rank) % comm.size] for rank in range(comm.size)]


def broadcast_message(
    message: Tensor | None, comm: Communicator, root: int, at_most: int
) -> Tensor:
    """Send the root's message down a binomial tree, ⌈log₂P⌉ rounds; other ranks pass None."""
    place = (comm.rank - root) % comm.size
    distance = 1
    while distance < comm.size:
        distance *= 2
    while distance > 1:
        distance //= 2
        if place % (2 * distance) == 0 and place + distance < comm.size:
            assert message is not None, "a rank sends only what it has received"
            comm.exchange({(comm.rank + distance) % comm.size: message}, {})
        elif place % (2 * distance) == distance:
            parent = (comm.rank - distance) % comm.size
            message = comm.exchange({}, {parent: at_most})[parent]
    assert message is not None, "the root has the message, every other rank has a parent"
    return message


def region_boundaries(size: int, ranks: int) -> list[int]:
    """Return the P+1 boundaries of the regions: rank r owns ``[r·n // P, (r+1)·n // P)``."""
    return [rank * size // ranks for rank in range(ranks + 1)]
