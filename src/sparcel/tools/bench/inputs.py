"""Inputs of the ranks, that any rank can compute for every other, and the exact results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.schemes.density import count_for
from sparcel.core.selectors import topk
from sparcel.core.selectors.base import distinct, integers
from sparcel.core.stream import SparseStream
from sparcel.errors import InputError

CLUSTERS = 16
SPREAD = 4
"""Clustered indices lie in `CLUSTERS` windows, the same on all ranks, that hold `SPREAD`·k
coordinates together. Two ranks share a quarter of their indices, and regions of equal length hold
unequal counts."""

_LEAST, _MOST = 1 << 10, 1 << 15
"""Magnitudes of selected values: whole numbers, whose sums over up to 512 ranks are exact."""

_WHERE, _VALUES, _WINDOWS, _REST = range(4)  # seeds


@dataclass(eq=False)
class Case:
    """The inputs of one cell of the table.

    Attributes
    ----------
    size, density, distribution
        Those of every rank's stream.
    ranks
        Number of ranks.
    gradients
        ``[rows, size]`` for the distribution ``"file"``: rank r has row r mod rows.
    """

    size: int
    density: float
    distribution: str
    ranks: int
    gradients: Tensor | None = field(default=None, repr=False)

    @property
    def k(self) -> int:
        """Number of coordinates that a rank selects."""
        return count_for(self.density, self.size)

    def stream(self, rank: int) -> SparseStream:
        """Return a rank's selection: k coordinates, float32, whole numbers."""
        if self.gradients is not None:
            return topk(self.gradient(rank), self.k)
        indices = self._indices(rank)
        drawn = integers(self.k, 2 * (_MOST - _LEAST), _VALUES, rank)
        sign = 1 - 2 * (drawn % 2)
        values = (sign * (_LEAST + drawn // 2)).float()
        return SparseStream.unchecked(indices.to(kernels.index_dtype(self.size)), values, self.size)

    def gradient(self, rank: int) -> Tensor:
        """Return a dense vector whose k largest coordinates are those of `stream`.

        The others are smaller, normally distributed whole numbers.
        """
        if self.gradients is not None:
            return _whole(self.gradients[rank % len(self.gradients)], self.ranks)
        generator = torch.Generator().manual_seed(_REST + 4 * rank)
        vector = torch.randn(self.size, generator=generator)
        vector.mul_(_LEAST / 5).round_().clamp_(1 - _LEAST, _LEAST - 1)
        stream = self.stream(rank)
        assert stream.indices is not None, "selections are sparse"
        kernels.scatter(vector, stream.indices, stream.values)
        return vector

    @cached_property
    def streams(self) -> list[SparseStream]:
        """The streams of all ranks, from which each rank computes the expected results."""
        return [self.stream(rank) for rank in range(self.ranks)]

    @cached_property
    def total(self) -> Sum:
        """The sum of all ranks' streams."""
        return sum_of(self.streams)

    def _indices(self, rank: int) -> Tensor:
        whose = 0 if self.distribution == "identical" else rank
        if self.distribution == "clustered":
            width = -(-SPREAD * self.k // CLUSTERS)
            places = self.size // width
            if places > CLUSTERS:
                windows = distinct(CLUSTERS, places, _WINDOWS, 0)
                inside = distinct(self.k, CLUSTERS * width, _WHERE, whose)
                return windows[inside // width] * width + inside % width
        return distinct(self.k, self.size, _WHERE, whose)


def load_gradients(path: Path) -> Tensor:
    """Read gradients, ``[rows, size]`` float32, from a .npy, .npz or .pt file.

    Raises
    ------
    InputError
        When the file is none of these, or holds anything but one vector, ``[size]``, or one a
        rank, ``[rows, size]``, of finite floats.
    """
    if path.suffix not in (".npy", ".npz", ".pt"):
        raise InputError(f"gradients come in a .npy, .npz or .pt file, got {path}")
    try:
        tensor = _loaded(path)
    except Exception as error:  # of whatever kind the bytes lead numpy or torch to
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(f"can't read gradients from {path}: {reason}") from error
    if tensor.ndim not in (1, 2) or not tensor.numel() or not bool(tensor.isfinite().all()):
        raise InputError(
            f"{path} must hold one finite vector [size], or one a rank [ranks, size], got shape"
            f" {tuple(tensor.shape)}"
        )
    return tensor.reshape(-1, tensor.shape[-1])


def _loaded(path: Path) -> Tensor:
    is_torch = path.suffix == ".pt"
    found: Any = torch.load(path, "cpu", weights_only=True) if is_torch else np.load(path)
    if isinstance(found, Mapping):  # a .npz file is one
        names = ", ".join(map(str, found))
        if len(found) != 1:
            raise InputError(f"it must hold one array, got {len(found)}: {names}")
        (found,) = found.values()
    if isinstance(found, np.ndarray) and found.dtype.kind in "fiu":
        found = found.astype(np.float32)
    tensor = torch.as_tensor(found)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"gradients must be real numbers, got {tensor.dtype}")
    return tensor.float()


def _whole(gradient: Tensor, ranks: int) -> Tensor:
    """Scale and round to whole numbers, as large as sums over all ranks stay exact in float32."""
    most = (1 << 24 - (ranks - 1).bit_length()) - 1
    largest = float(gradient.abs().max())
    return (gradient * (most / largest)).round_() if largest else gradient.clone()


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


def sum_of(streams: Sequence[SparseStream]) -> Sum:
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
