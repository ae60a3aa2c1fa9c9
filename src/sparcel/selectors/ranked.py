"""Exact selection of the largest coordinates, by the kernels."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from sparcel import kernels
from sparcel._checks import FLOAT_DTYPES, Array, as_tensor, checked_whole
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


def topk(x: Array, k: int) -> SparseStream:
    """Select the ``min(k, nnz)`` coordinates of largest magnitude, exactly.

    Parameters
    ----------
    x
        ``[size]``, float16, bfloat16, float32 or float64; a tensor, or an array of NumPy.
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
    x = as_tensor(x, "x")
    if x.ndim != 1 or x.dtype not in FLOAT_DTYPES:
        raise InputError(
            f"topk selects from a one-dimensional float tensor, got {x.dtype} of shape"
            f" {tuple(x.shape)}; flatten it first"
        )
    return ExactTopK().select(x.detach().contiguous(), checked_whole(k, "k", at_least=1))
