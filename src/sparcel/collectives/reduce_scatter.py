"""Each rank reduces one region of the index range: the split phase of larger algorithms."""

from __future__ import annotations

from collections.abc import Sequence

from sparcel import formats
from sparcel.collectives._transfer import reduce_messages, region_boundaries, stream_bytes
from sparcel.comm import Communicator
from sparcel.ops import SUM, Op
from sparcel.stream import SparseStream


def reduce_scatter(
    stream: SparseStream, comm: Communicator, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Return this rank's region of the reduced stream, numbered from the region's start.

    Rank r owns ``[r·n // P, (r+1)·n // P)``. Every rank sends each owner its slice directly;
    destinations rotate, so that no owner is everybody's first. Owners reduce in the order of the
    ranks.

    Rounds: P−1. Words a rank: at most 2k sent.
    Source: SparCML, section 5.3.2 (the split phase).
    """
    boundaries = region_boundaries(stream.size, comm.size)
    return reduce_regions(stream.compact(op), boundaries, comm, op, max_nnz)


def reduce_regions(
    stream: SparseStream,
    boundaries: Sequence[int],
    comm: Communicator,
    op: Op = SUM,
    max_nnz: int | None = None,
) -> SparseStream:
    """Return this rank's region as `reduce_scatter` does, of regions of any size.

    Rank r owns ``[boundaries[r], boundaries[r + 1])``; all ranks give the same P+1 boundaries.
    """
    parts = stream.split(boundaries)
    own = parts[comm.rank]
    others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
    messages = comm.exchange(
        {owner: formats.encode(parts[owner].compact(op)) for owner in others},
        dict.fromkeys(reversed(others), stream_bytes(own, max_nnz)),
    )
    messages[comm.rank] = formats.encode(own)
    return reduce_messages(messages, own, comm, op).compact(op)
