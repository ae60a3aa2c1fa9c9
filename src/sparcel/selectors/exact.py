"""Exact top-k, the default selector."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel._checks import FLOAT_DTYPES, check_type, whole_number
from sparcel.errors import InputError
from sparcel.selectors.ranked import Ranked
from sparcel.stream import SparseStream


@dataclass(eq=False)
class ExactTopK(Ranked):
    """The ``min(k, nnz)`` coordinates of largest magnitude; ties go to the lowest index."""

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Select k of the whole vector."""
        return k, None


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
    return ExactTopK().select(x.detach().contiguous(), whole_number(k, "k", at_least=1))
