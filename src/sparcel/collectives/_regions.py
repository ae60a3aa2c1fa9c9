"""Boundaries of regions that hold equal shares of what the ranks send."""

from __future__ import annotations

import torch
from torch import Tensor

from sparcel import patterns
from sparcel.collectives._counts import sum_counts
from sparcel.comm import Communicator
from sparcel.stream import SparseStream

TOLERANCE, TOLERATED = 512, 64
"""By how many entries a region may exceed its share, or by which part of it, if that is more; or
by P entries (see below)."""


def balanced_boundaries(
    stream: SparseStream, comm: Communicator, max_nnz: int | None
) -> tuple[list[int], bool]:
    """Part the coordinates into regions so that owners receive alike, whatever the distribution.

    Parameters
    ----------
    stream
        Sparse: what this rank will send, at most ``max_nnz`` entries.

    Returns
    -------
    boundaries
        P+1, the same on all ranks: region r is ``[boundaries[r], boundaries[r + 1])``. The ranks'
        entries in a region are at most ⌈all entries / P⌉ + max(P, TOLERANCE, all / P / TOLERATED).
    finite
        Whether the streams of all ranks are.

    Notes
    -----
    The ranks sum how many of their entries lie below each of about a thousand edges. Where too
    many lie between the two edges around a boundary's due place, new edges are put there alone.
    One coordinate cannot be split, but no more than P entries are at one.
    Source: Ok-Topk, section 3.1.1, which averages the ranks' own boundaries instead.
    """
    assert stream.indices is not None, "the caller made it sparse"
    indices, size, ranks = stream.indices, stream.size, comm.size
    counters = counters_for(ranks)
    limit = ranks * (size if max_nnz is None else max_nnz)

    def count_below(edges: Tensor) -> tuple[Tensor, bool]:
        local = torch.searchsorted(indices, edges.to(indices))
        return sum_counts(local, comm, limit, stream.finite)

    start, stop = torch.tensor([0]), torch.tensor([size])
    edges = torch.cat((_subdivide(start, stop, counters), stop))
    below, finite = count_below(edges)
    edges, below = torch.cat((start, edges)), torch.cat((start, below))
    due = torch.arange(1, ranks) * below[-1] // ranks
    tolerance = max(ranks, TOLERANCE, int(below[-1]) // (ranks * TOLERATED))
    while finite and (crowded := _crowded(below, due, tolerance)).numel():
        new = _subdivide(edges[crowded], edges[crowded + 1], counters // crowded.numel())
        edges, order = torch.cat((edges, new)).sort()
        below = torch.cat((below, count_below(new)[0]))[order]
    cell = _cells(below, due)
    nearer = cell + (2 * (due - below[cell]) > below.diff()[cell]).long()
    return [0, *edges[nearer].tolist(), size], finite


def _cells(below: Tensor, due: Tensor) -> Tensor:
    """Return the last cell with no more entries below it than are due, for each boundary.

    Cell j is between edges j and j + 1, with ``below[j]`` entries below it.
    """
    cells = torch.searchsorted(below, due, right=True) - 1
    return cells.clamp(max=below.numel() - 2)


def _crowded(below: Tensor, due: Tensor, tolerance: int) -> Tensor:
    """Return those of the boundaries' cells that hold more entries than ``tolerance``."""
    cells: Tensor = _cells(below, due).unique()
    return cells[below.diff()[cells] > tolerance]


def counters_for(ranks: int) -> int:
    """Return how many edges are counted at a time: several for every boundary."""
    return max(1024, 4 * ranks)


def average_boundaries(stream: SparseStream, comm: Communicator) -> list[int]:
    """Average the boundaries that would part each rank's own entries evenly.

    Source: Ok-Topk, section 3.1.1; in integers here, which all ranks divide alike.
    """
    assert stream.indices is not None, "the caller made it sparse"
    ranks, size = comm.size, stream.size
    if stream.nnz:
        own = stream.indices[torch.arange(1, ranks) * stream.nnz // ranks].long()
    else:
        own = torch.tensor(patterns.regions(size, ranks)[1:-1], dtype=torch.int64)
    total, _ = sum_counts(own, comm, ranks * size)
    return [0, *(total // ranks).tolist(), size]


def _subdivide(starts: Tensor, stops: Tensor, parts: int) -> Tensor:
    """Return the sorted edges that cut each ``[start, stop)`` into about ``parts`` parts."""
    widths = (-(-(stops - starts) // parts)).clamp(min=1)
    edges = starts[:, None] + widths[:, None] * torch.arange(1, parts)
    return edges[edges < stops[:, None]]
