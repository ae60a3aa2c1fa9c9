"""A dense all-reduce by a tree, as a baseline: up a binomial tree and down again, in chunks.

A chunk goes up while the one before it is added a level higher, and down while later ones still go
up: a rank sends and receives in both directions at once, as in NCCL's trees. NCCL has two trees,
each for one half of the vector, in which no rank has more than two children; here rank 0 has
⌈log₂P⌉ of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparcel.core import patterns
from sparcel.core.comm import Communicator

CHUNK_BYTES = 1 << 20


class Tree:
    """A rank's place in the tree of rank 0.

    Attributes
    ----------
    parent, children
        The ranks above and below; None above the root.
    depth
        How many levels the rank is below the root.
    heights
        By child, how many levels its subtree has below it.
    height
        How many levels are below this rank.
    levels
        How many levels are below the root.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        levels = patterns.binomial_tree(rank, ranks)
        self.parent = next((level.source for level in levels if level.source is not None), None)
        self.children = [level.to for level in levels if level.to is not None]
        self.depth = rank.bit_count()
        self.heights = {child: _height(child, ranks) for child in self.children}
        self.height, self.levels = _height(rank, ranks), _height(0, ranks)


def _height(rank: int, ranks: int) -> int:
    """Return how many levels are below a rank."""
    below = [level.to for level in patterns.binomial_tree(rank, ranks) if level.to is not None]
    return max((1 + _height(child, ranks) for child in below), default=0)


def tree_all_reduce(vector: Tensor, comm: Communicator, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Sum a contiguous vector over all ranks in place, in its own dtype; all ranks call.

    In tick t a rank sends its chunk t − height up and, when the root has had time to finish it,
    chunk t − levels − depth down. So both ends of a message exchange it in the same tick.
    """
    tree = Tree(comm.rank, comm.size)
    chunks = vector.split(max(1, chunk_bytes // vector.itemsize))
    for tick in range(len(chunks) + 2 * tree.levels):
        _tick(tick, tree, chunks, comm)


def _tick(tick: int, tree: Tree, chunks: tuple[Tensor, ...], comm: Communicator) -> None:
    """Exchange the chunks that are due in a tick, and add those from below."""
    down = tick - tree.levels - tree.depth
    rising = {child: tick - height for child, height in tree.heights.items()}
    sends = dict.fromkeys(tree.children, down)
    receives = dict(rising)
    if tree.parent is not None:
        sends[tree.parent] = tick - tree.height
        receives[tree.parent] = down + 1
    there = range(len(chunks))
    arrived = comm.exchange(
        {rank: chunks[place].view(torch.uint8) for rank, place in sends.items() if place in there},
        {rank: chunks[place].nbytes for rank, place in receives.items() if place in there},
    )
    for rank, message in arrived.items():
        chunk = chunks[receives[rank]]
        values = message.view(chunk.dtype)
        if rank == tree.parent:
            chunk.copy_(values)
        else:
            chunk.add_(values)
