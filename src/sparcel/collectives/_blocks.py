"""Blocks of winners from their owners to every rank, evened out first where that is cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sparcel import formats, kernels
from sparcel.collectives._transfer import (
    DIRECT_BYTES,
    DIRECT_RANKS,
    decode_from,
    gather_messages,
)
from sparcel.collectives.all_gather import gather_streams
from sparcel.comm import Communicator
from sparcel.formats import coo
from sparcel.formats.header import ALIGNMENT, HEADER_BYTES
from sparcel.stream import SparseStream


@dataclass(frozen=True)
class Pieces:
    """How sorted entries move when every rank is to hold as many as any other, up to one.

    All K entries are numbered in the order of their indices. Ranks 0, 1, … hold the first, the
    next, …; rank r is to hold those from ``r·K // P`` up to ``(r+1)·K // P``. Piece j, entries
    ``[start[j], stop[j])``, goes from rank ``owner[j]`` to rank ``target[j]``, often the same.
    """

    start: Tensor
    stop: Tensor
    owner: Tensor
    target: Tensor

    @classmethod
    def evening(cls, counts: Tensor) -> Pieces:
        """Return the pieces, at most 2P, for ranks that hold ``counts`` entries, ``[P]``."""
        held = counts.cumsum(0)
        due = torch.arange(1, counts.numel() + 1) * held[-1] // counts.numel()
        cuts = torch.cat((torch.tensor([0]), held, due)).unique()
        start, stop = cuts[:-1], cuts[1:]
        owner = torch.searchsorted(held, start, right=True)
        target = torch.searchsorted(due, start, right=True)
        return cls(start, stop, owner, target)


def gather_direct(
    block: SparseStream, counts: Tensor, boundaries: Sequence[int], comm: Communicator
) -> SparseStream:
    """Join the ranks' blocks, each numbered from the start of the region that it is of."""
    sizes = [stop - start for start, stop in pairwise(boundaries)]
    at_most = int(_compact_bytes(counts, torch.tensor(sizes), block.dtype).max())
    messages = gather_messages(formats.encode(block.compact()), comm, at_most)
    parts = []
    for rank, message in enumerate(messages):
        part = decode_from(rank, message, block.empty_like(sizes[rank]), comm)
        parts.append(placed(part, boundaries[rank], boundaries[-1]))
    return _join(parts)


def gather_evened(block: SparseStream, counts: Tensor, comm: Communicator) -> SparseStream:
    """Join the ranks' blocks, sparse parts of one vector, evened out before they are gathered.

    Source: Ok-Topk, section 3.1.2 (data balancing).
    """
    share = -(-int(counts.sum()) // comm.size)
    block = _even_out(block, Pieces.evening(counts), comm)
    return _join(gather_streams(block, comm, _at_most(share, block)))


def placed(part: SparseStream, start: int, size: int) -> SparseStream:
    """Return the nonzero coordinates of a part, as those from ``start`` on of a whole vector."""
    if part.is_dense:
        part = part.largest(part.size)
    assert part.indices is not None, "topk gives sparse streams"
    indices = part.indices.to(kernels.index_dtype(size)) + start
    return SparseStream.unchecked(indices, part.values, size)


def _even_out(block: SparseStream, pieces: Pieces, comm: Communicator) -> SparseStream:
    """Send and receive the pieces that change hands."""
    lengths = pieces.stop - pieces.start
    targets = pieces.target[pieces.owner == comm.rank].tolist()
    parts = dict(zip(targets, _cut(block, lengths[pieces.owner == comm.rank]), strict=True))
    sources = pieces.owner[pieces.target == comm.rank].tolist()
    due = dict(zip(sources, lengths[pieces.target == comm.rank].tolist(), strict=True))
    arrived = comm.exchange(
        {rank: formats.encode(part) for rank, part in parts.items() if rank != comm.rank},
        {rank: _at_most(nnz, block) for rank, nnz in due.items() if rank != comm.rank},
    )
    return _join(
        [block.empty_like()]
        + [
            parts[rank] if rank == comm.rank else decode_from(rank, arrived[rank], block, comm)
            for rank in sources
        ]
    )


def _cut(block: SparseStream, lengths: Tensor) -> list[SparseStream]:
    """Cut a sparse stream into consecutive ones of ``lengths`` entries, numbered as it is."""
    assert block.indices is not None, "winners are sparse"
    pieces = zip(*(t.split(lengths.tolist()) for t in (block.indices, block.values)), strict=True)
    return [SparseStream.unchecked(indices, values, block.size) for indices, values in pieces]


def _join(parts: Sequence[SparseStream]) -> SparseStream:
    """Join sparse streams of one vector whose indices follow each other."""
    indices = [part.indices for part in parts if part.indices is not None]
    values = torch.cat([part.values for part in parts])
    return SparseStream.unchecked(torch.cat(indices), values, parts[0].size)


def _at_most(nnz: int, like: SparseStream) -> int:
    return coo.message_bytes(nnz, like.size, like.dtype, None)


def direct_bytes(counts: Tensor, boundaries: Sequence[int], dtype: torch.dtype) -> int:
    """Return the worst rank's volume in `gather_direct` of ``counts`` entries a rank, ``[P]``."""
    sizes = torch.tensor(boundaries).diff()
    return int(torch.maximum(*_gathering_bytes(_compact_bytes(counts, sizes, dtype))).max())


def evened_bytes(counts: Tensor, like: SparseStream) -> int:
    """Return the worst rank's volume in `gather_evened`, for a vector like ``like``."""
    pieces = Pieces.evening(counts)
    lengths = pieces.stop - pieces.start
    shares = torch.zeros_like(counts).index_add(0, pieces.target, lengths)
    moved = _sparse_bytes(lengths, like) * (pieces.owner != pieces.target)
    sent, received = _gathering_bytes(_sparse_bytes(shares, like))
    sent = sent.index_add(0, pieces.owner, moved)
    received = received.index_add(0, pieces.target, moved)
    return int(torch.maximum(sent, received).max())


def _gathering_bytes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each rank sends and receives in `gather_messages` of ``blocks`` bytes each."""
    ranks = blocks.numel()
    if ranks <= DIRECT_RANKS and int(blocks.max()) <= DIRECT_BYTES:
        return (ranks - 1) * blocks, blocks.sum() - blocks
    before = torch.cat((torch.tensor([0]), blocks, blocks)).cumsum(0)
    sent = torch.zeros_like(blocks)
    distance = 1
    while distance < ranks:
        count = min(distance, ranks - distance)
        sent += before[count : count + ranks] - before[:ranks]
        distance *= 2
    return sent, blocks.sum() - blocks


def _sparse_bytes(counts: Tensor, like: SparseStream) -> Tensor:
    """Return the bytes of sparse messages of ``counts`` entries: `coo.message_bytes`, for many."""
    values, indices = like.dtype.itemsize, kernels.index_dtype(like.size).itemsize
    return HEADER_BYTES + _padded(counts * values) + _padded(counts * indices)


def _compact_bytes(counts: Tensor, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of messages of ``counts`` entries of ``sizes`` coordinates, compact."""
    value, index = dtype.itemsize, torch.where(sizes > torch.iinfo(torch.int32).max, 8, 4)
    sparse = _padded(counts * value) + _padded(counts * index)
    dense = counts * (index + value) > sizes * value
    return HEADER_BYTES + torch.where(dense, _padded(sizes * value), sparse)


def _padded(nbytes: Tensor) -> Tensor:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
