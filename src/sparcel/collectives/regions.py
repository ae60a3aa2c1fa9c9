"""Boundaries of regions that hold equal shares of what the ranks send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sparcel import device, patterns
from sparcel.collectives._counts import Counted, counters_for, sum_counts, sum_stages
from sparcel.comm import Communicator
from sparcel.stages import Problem, Stage
from sparcel.stream import SparseStream

TOLERANCE, TOLERATED = 512, 6
"""A region may exceed its share by `TOLERANCE` entries, by the share / `TOLERATED`, or by P
entries, whichever is the most (see below)."""


def balanced_boundaries(
    stream: SparseStream, comm: Communicator, max_nnz: int | None
) -> tuple[list[int], bool]:
    """Divide the coordinates into regions so that all owners receive about as many entries.

    Parameters
    ----------
    stream
        Sparse: the entries that this rank will send, at most ``max_nnz``.

    Returns
    -------
    boundaries
        P+1, the same on all ranks: region r is ``[boundaries[r], boundaries[r + 1])``. With N the
        entries of all ranks, a region has at most ⌈N / P⌉ + max(P, TOLERANCE, N / P / TOLERATED).
    finite
        Whether the streams of all ranks are finite.

    Notes
    -----
    The ranks sum how many of their entries lie below each of some edges. A boundary
    belongs between two edges. If too many entries lie between them, the ranks count again with new
    edges between these two. One coordinate cannot be split, but it has at most P entries.
    Source: Ok-Topk, section 3.1.1, which averages the ranks' own boundaries instead.
    """
    assert stream.indices is not None, "the caller made it sparse"
    indices, size, ranks = stream.indices, stream.size, comm.size
    cuts = edges_for(ranks)
    limit = ranks * (size if max_nnz is None else max_nnz)

    def count_below(edges: Tensor) -> tuple[Tensor, bool]:
        places = device.put(edges, indices.device, indices.dtype)
        return sum_counts(torch.searchsorted(indices, places), comm, limit, stream.finite)

    start, stop = torch.tensor([0]), torch.tensor([size])
    edges = torch.cat((_subdivide(start, stop, cuts), stop))
    below, finite = count_below(edges)
    edges, below = torch.cat((start, edges)), torch.cat((start, below))
    wanted = torch.arange(1, ranks) * below[-1] // ranks
    tolerance = max(ranks, TOLERANCE, int(below[-1]) // (ranks * TOLERATED))
    while finite and (crowded := _crowded(below, wanted, tolerance)).numel():
        new = _subdivide(edges[crowded], edges[crowded + 1], cuts // crowded.numel())
        edges, order = torch.cat((edges, new)).sort()
        below = torch.cat((below, count_below(new)[0]))[order]
    cell = _cells(below, wanted)
    nearer = cell + (2 * (wanted - below[cell]) > below.diff()[cell]).long()
    return [0, *edges[nearer].tolist(), size], finite


def boundaries_stages(problem: Problem, sums: Sequence[Counted]) -> Iterator[Stage]:
    """Yield the stages of `balanced_boundaries` that sums these counts."""
    for counted in sums:
        yield from sum_stages(problem, counted, problem.ranks * problem.k)


def _cells(below: Tensor, wanted: Tensor) -> Tensor:
    """Return, for each boundary, the last cell with at most ``wanted`` entries below it.

    Cell j lies between edges j and j + 1, and has ``below[j]`` entries below it.
    """
    cells = torch.searchsorted(below, wanted, right=True) - 1
    return cells.clamp(max=below.numel() - 2)


def _crowded(below: Tensor, wanted: Tensor, tolerance: int) -> Tensor:
    """Return the boundaries' cells that hold more than ``tolerance`` entries."""
    cells: Tensor = _cells(below, wanted).unique()
    return cells[below.diff()[cells] > tolerance]


def edges_for(ranks: int) -> int:
    """Return how many edges are counted in a sum: several for each boundary."""
    return max(counters_for(ranks), 4 * ranks)


def average_boundaries(stream: SparseStream, comm: Communicator) -> list[int]:
    """Average the boundaries that would divide each rank's own entries evenly.

    Source: Ok-Topk, section 3.1.1. The average is computed in integers, so all ranks agree.
    """
    assert stream.indices is not None, "the caller made it sparse"
    ranks, size = comm.size, stream.size
    if stream.nnz:
        places = patterns.regions(stream.nnz, ranks)[1:-1]
        own = stream.indices[device.put(places, stream.device, torch.int64)].long()
    else:
        own = torch.tensor(patterns.regions(size, ranks)[1:-1], dtype=torch.int64)
    total, _ = sum_counts(own, comm, ranks * size)
    return [0, *(total // ranks).tolist(), size]


def _subdivide(starts: Tensor, stops: Tensor, parts: int) -> Tensor:
    """Return the sorted edges that cut each ``[start, stop)`` into about ``parts`` parts."""
    widths = (-(-(stops - starts) // parts)).clamp(min=1)
    edges = starts[:, None] + widths[:, None] * torch.arange(1, parts)
    return edges[edges < stops[:, None]]
