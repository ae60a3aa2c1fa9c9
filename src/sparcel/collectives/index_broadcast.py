"""One rank's indices to every rank, without sending all of them to anybody but once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparcel import formats
from sparcel.collectives._transfer import decode_from, region_boundaries
from sparcel.comm import Communicator
from sparcel.errors import FormatError
from sparcel.formats import coo
from sparcel.stream import SparseStream


def index_broadcast(
    stream: SparseStream, comm: Communicator, root: int, max_nnz: int
) -> SparseStream:
    """Return the root's indices on every rank, as a sparse stream of rows of width 0.

    The root scatters them in P parts down a binomial tree, then all gather the parts. Parts that
    follow each other travel as one.

    Parameters
    ----------
    stream
        On the root sparse, with at most ``max_nnz`` entries; on other ranks, whose entries do not
        matter, of the same size.

    Rounds: 2⌈log₂P⌉. Words: the root sends at most 2k, receives k; others receive at most 3k/2.
    Source: ScaleCom, section 3 (the leader's indices); the scattered broadcast is van de Geijn's.
    """
    cuts = region_boundaries(max_nnz, comm.size)
    if comm.rank == root:
        assert stream.indices is not None, "the root's stream is sparse"
        rows = stream.values.new_empty(stream.nnz, 0)
        held = SparseStream.unchecked(stream.indices, rows, stream.size, stream.finite)
    else:
        held = SparseStream.unchecked(None, stream.values.new_empty(stream.size, 0), stream.size)
        held = held.empty_like()
    return _gather(_scatter(held, comm, root, cuts), comm, root, cuts)


def _scatter(
    held: SparseStream, comm: Communicator, root: int, cuts: Sequence[int]
) -> SparseStream:
    """Return this rank's part of what the root holds, entries ``cuts[i]`` … at place i."""
    place = (comm.rank - root) % comm.size
    distance = 1 << (comm.size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if place % (2 * distance) == 0 and place + distance < comm.size:
            child, kept = (comm.rank + distance) % comm.size, cuts[place + distance] - cuts[place]
            comm.exchange({child: formats.encode(_entries(held, kept, None))}, {})
            held = _entries(held, 0, kept)
        elif place % (2 * distance) == distance:
            parent = (comm.rank - distance) % comm.size
            due = _bytes(held, cuts[min(place + distance, comm.size)] - cuts[place])
            held = decode_from(parent, comm.exchange({}, {parent: due})[parent], held, comm)
    return held


def _gather(own: SparseStream, comm: Communicator, root: int, cuts: Sequence[int]) -> SparseStream:
    """Join the parts of all places, as `gather_messages` does, but those in a row to one.

    A rank holds the parts from its place up to the last one, then those from the first one on.
    """
    place = (comm.rank - root) % comm.size
    upper, lower = own, own.empty_like()
    parts = 1
    while parts < comm.size:
        count = min(parts, comm.size - parts)
        below, above = (comm.rank - parts) % comm.size, (comm.rank + parts) % comm.size
        leaving = [
            _entries(upper, 0, cuts[min(place + count, comm.size)] - cuts[place]),
            _entries(lower, 0, cuts[max(place + count - comm.size, 0)]),
        ]
        due = {above: 2 * _bytes(own, cuts[-1])}
        arrived = comm.exchange_parts({below: [formats.encode(s) for s in leaving]}, due)[above]
        next_upper, next_lower = _two(arrived, own, above, comm)
        if place + parts < comm.size:
            upper, lower = _joined(upper, next_upper), next_lower
        else:  # the rank above begins with what follows this one's lower parts
            lower = _joined(lower, next_upper)
        parts += count
    return _joined(lower, upper)


def _two(
    arrived: list[Tensor], like: SparseStream, source: int, comm: Communicator
) -> tuple[SparseStream, SparseStream]:
    messages = [message for part in arrived for message in formats.decode_all(part)]
    if len(messages) != 2:
        raise FormatError(
            f"rank {source} sent rank {comm.rank} {len(messages)} messages in one, where 2 were"
            " due; every rank must call the same collective"
        )
    upper, lower = (decode_from(source, message, like, comm) for message in messages)
    return upper, lower


def _entries(stream: SparseStream, start: int, stop: int | None) -> SparseStream:
    """Return the entries at these positions."""
    assert stream.indices is not None, "indices travel"
    indices, rows = stream.indices[start:stop], stream.values[start:stop]
    return SparseStream.unchecked(indices, rows, stream.size, stream.finite)


def _joined(first: SparseStream, second: SparseStream) -> SparseStream:
    """Return the entries of both, where all of the first come before those of the second."""
    assert first.indices is not None and second.indices is not None, "indices travel"
    indices = torch.cat([first.indices, second.indices])
    rows = first.values.new_empty(len(indices), 0)
    return SparseStream.unchecked(indices, rows, first.size, first.finite and second.finite)


def _bytes(like: SparseStream, nnz: int) -> int:
    return coo.message_bytes(nnz, like.size, like.dtype, 0)
