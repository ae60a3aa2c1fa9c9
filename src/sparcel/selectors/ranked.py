"""Exact selection of the largest coordinates, of the vector or of each chunk, by the kernels.

Selections of each chunk are SparCML's, with its buckets, and ScaleCom's.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from sparcel import kernels
from sparcel._checks import FLOAT_DTYPES, check_type, checked_whole
from sparcel.errors import InputError
from sparcel.selectors.base import Selector, stream_of
from sparcel.stream import SparseStream


@dataclass(eq=False)
class Ranked(Selector):
    """Selects ``count`` of every ``chunk`` consecutive coordinates, or of all, exactly.

    Each chunk gives min(count, nnz of the chunk); the last chunk may be short. Ties go to the
    lowest index. Selecting from memory + gradient takes one pass over the vectors.
    """

    @abstractmethod
    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Return ``(count, chunk)``; the chunk is None if the whole vector is one chunk."""

    def most(self, k: int, size: int) -> int:
        """Return ``count`` for each full chunk, plus what the short last chunk can give."""
        count, chunk = self.rule(k, size)
        if chunk is None:
            return min(count, size)
        full, rest = divmod(size, chunk)
        return full * min(count, chunk) + min(count, rest)

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Select by the rule."""
        count, chunk = self.rule(k, x.numel())
        if chunk is None:
            return stream_of(*kernels.topk(x, count), x)
        return stream_of(*kernels.topk_chunked(x, count, chunk), x)

    def take(self, addition: kernels.Addition, k: int, step: int = 0) -> SparseStream:
        """Add, select and clear in one pass."""
        count, chunk = self.rule(k, addition.memory.numel())
        indices, values, finite = kernels.accumulate_topk(addition, count, chunk)
        if finite is False:
            indices, values = indices[:0], values[:0]
        return stream_of(indices, values, addition.scratch, finite)


@dataclass(eq=False)
class ExactTopK(Ranked):
    """The ``min(k, nnz)`` coordinates of largest magnitude; ties go to the lowest index."""

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Select k of the whole vector."""
        return k, None


@dataclass(eq=False)
class Bucketed(Ranked):
    """The same number of the largest of every ``bucket`` consecutive coordinates.

    Each bucket gives max(1, round(bucket·k/size)) coordinates, or all its nonzeros if it has fewer.
    A vector no longer than a bucket gives min(k, nnz). In a longer vector the total differs from k
    by up to half a coordinate a bucket, because of the rounding; by more if k is below the number
    of buckets, because every bucket gives one. A short last bucket gives as many as a full one.

    Parameters
    ----------
    bucket
        Length of a bucket.
    count
        How many to select of each bucket, whatever k is. None: the rule above.

    Source: SparCML, section 8.3.
    """

    bucket: int = 512
    count: int | None = None

    def __post_init__(self) -> None:
        self.bucket = checked_whole(self.bucket, "bucket", at_least=1)
        if self.count is not None:
            self.count = checked_whole(self.count, "count", at_least=1)

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Round the density to a count a bucket."""
        if self.count is not None:
            return self.count, self.bucket
        density = min(k, size) / max(size, 1)
        return max(1, round(min(self.bucket, size) * density)), self.bucket


@dataclass(eq=False)
class Chunkwise(Ranked):
    """The ``m`` largest of each of about k/m chunks of equal length.

    Chunks have ⌈size/⌊k/m⌋⌉ coordinates, so never more than k are selected. Fewer are selected
    because lengths are whole numbers (by a share of at most density/m: 1 % if k is 1 % of the
    coordinates and m is 1), and because k need not be a multiple of m and the last chunk is short
    (by up to 2·(m−1)). A chunk with fewer than m nonzeros gives fewer.

    Parameters
    ----------
    m
        How many to select of each chunk; if k is less, k of the whole vector.

    Source: ScaleCom, its chunk-wise quasi-sort.
    """

    m: int = 1

    def __post_init__(self) -> None:
        self.m = checked_whole(self.m, "m", at_least=1)

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Choose the shortest chunks that let no more than k through."""
        k = max(1, min(k, size))
        count = min(self.m, k)
        return count, max(1, -(-size // (k // count)))


def topk(x: Tensor, k: int) -> SparseStream:
    """Select the ``min(k, nnz)`` coordinates of largest magnitude, exactly.

    Parameters
    ----------
    x
        ``[size]``, float16, bfloat16, float32 or float64.
    k
        How many to select, at least 1. Ties go to the lowest index; zeros are never selected.

    Returns
    -------
    SparseStream
        Sparse, with the values of ``x`` at the selected coordinates.

    Raises
    ------
    InputError
        When ``x`` is not a one-dimensional float tensor, or ``k < 1``.
    """
    check_type(x, Tensor, "x")
    if x.ndim != 1 or x.dtype not in FLOAT_DTYPES:
        raise InputError(
            f"topk selects from a one-dimensional float tensor, got {x.dtype} of shape"
            f" {tuple(x.shape)}; flatten it first"
        )
    return ExactTopK().select(x.detach().contiguous(), checked_whole(k, "k", at_least=1))
