"""One rank's indices to every rank, without sending all of them to anybody but once."""

from __future__ import annotations

import torch

from sparcel import formats
from sparcel.collectives._transfer import decode_from, gather_messages
from sparcel.comm import Communicator
from sparcel.formats import coo
from sparcel.stream import SparseStream


def index_broadcast(
    stream: SparseStream, comm: Communicator, root: int, max_nnz: int
) -> SparseStream:
    """Return the root's indices on every rank, as a sparse stream of rows of width 0.

    The root scatters them in P parts down a binomial tree, then all gather the parts.

    Parameters
    ----------
    stream
        On the root sparse, with at most ``max_nnz`` entries; on other ranks, whose entries do not
        matter, of the same size.

    Rounds: 2⌈log₂P⌉. Words: the root sends at most 2k(P−1)/P; others receive fewer than 3k/2.
    Source: ScaleCom, section 3 (the leader's indices); the scattered broadcast is van de Geijn's.
    """
    like = SparseStream.unchecked(None, stream.values.new_empty(stream.size, 0), stream.size)
    like = like.empty_like()
    place = (comm.rank - root) % comm.size
    at_most = coo.message_bytes(-(-max_nnz // comm.size), stream.size, stream.dtype, 0)

    # held[j] is the part of place + j: the root begins with all of them, each rank ends with one.
    held = [formats.encode(part) for part in _parts(stream, comm.size)] if place == 0 else []
    distance = 1 << (comm.size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if place % (2 * distance) == 0 and place + distance < comm.size:
            comm.exchange({(comm.rank + distance) % comm.size: torch.cat(held[distance:])}, {})
            held = held[:distance]
        elif place % (2 * distance) == distance:
            parent, count = (comm.rank - distance) % comm.size, min(distance, comm.size - place)
            held = formats.decode_all(comm.exchange({}, {parent: count * at_most})[parent])

    messages = gather_messages(held[0], comm, at_most)
    parts = [
        decode_from(rank, messages[rank], like, comm)
        for rank in ((root + place) % comm.size for place in range(comm.size))
    ]
    finite = all(part.finite for part in parts)
    indices = torch.cat([part.indices for part in parts if part.indices is not None])
    return SparseStream.unchecked(
        indices, like.values.new_empty(len(indices), 0), stream.size, finite
    )


def _parts(stream: SparseStream, ranks: int) -> list[SparseStream]:
    """Cut the indices into as many parts of nearly equal length."""
    assert stream.indices is not None, "the root's stream is sparse"
    return [
        SparseStream.unchecked(
            part, stream.values.new_empty(len(part), 0), stream.size, stream.finite
        )
        for part in stream.indices.tensor_split(ranks)
    ]
