"""Expected results of exchanges, from all ranks' inputs, in plain torch and double precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel.stream import SparseStream

_DENSE_SHARE = 4
"""Memory that sorting an entry takes, in float64 coordinates of a dense vector."""


@dataclass(frozen=True)
class Sum:
    """Coordinates, int64 and sorted, and their exact values, float64, ``[nnz]`` each."""

    indices: Tensor
    values: Tensor

    def largest(self, k: int) -> Sum:
        """Return the k largest magnitudes that are not zero; ties go to the lowest index."""
        kept = self.values.abs().argsort(descending=True, stable=True)[:k]
        kept = kept[self.values[kept] != 0].sort().values
        return Sum(self.indices[kept], self.values[kept])


def total(streams: Sequence[SparseStream]) -> Sum:
    """Return the sum of streams; if they hold many entries, without those that add up to zero."""
    size = streams[0].size
    if _DENSE_SHARE * sum(stream.nnz for stream in streams) < size:
        return _added([_parts(stream) for stream in streams])
    dense = torch.zeros(size, dtype=torch.float64)
    for stream in streams:
        part = _parts(stream)
        dense.index_add_(0, part.indices, part.values)
    indices = dense.nonzero().squeeze(1)
    return Sum(indices, dense[indices])


def tree_largest(streams: Sequence[SparseStream], k: int) -> Sum:
    """Return the result of a tree of pairwise sums, each of which keeps its k largest entries.

    Source: gTop-k, Definition 1 and Algorithm 3.
    """
    level = [_parts(stream).largest(k) for stream in streams]
    while len(level) > 1:
        pairs = [level[place : place + 2] for place in range(0, len(level), 2)]
        level = [_added(pair).largest(k) for pair in pairs]
    return level[0]


def count_wrong(result: SparseStream | Tensor, expected: Sum) -> int:
    """Count the coordinates in which the result differs from the expected sum."""
    stream = result if isinstance(result, SparseStream) else None
    if stream is not None and not stream.finite:
        return stream.size
    if stream is None or stream.is_dense:
        values = result.values if isinstance(result, SparseStream) else result
        difference = values.clone()
        difference[expected.indices] -= expected.values.to(values.dtype)
        return int(difference.count_nonzero())
    negative = Sum(expected.indices, -expected.values)
    return int(_added([_parts(stream), negative]).values.count_nonzero())


def _parts(stream: SparseStream) -> Sum:
    values = stream.values.double()
    if stream.indices is None:
        return Sum(torch.arange(stream.size), values)
    return Sum(stream.indices.long(), values)


def _added(sums: Sequence[Sum]) -> Sum:
    indices, place = torch.cat([one.indices for one in sums]).unique(return_inverse=True)
    values = torch.zeros(indices.numel(), dtype=torch.float64)
    return Sum(indices, values.index_add_(0, place, torch.cat([one.values for one in sums])))
