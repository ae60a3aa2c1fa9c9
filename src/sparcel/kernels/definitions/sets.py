"""Differences and intersections of sparse vectors."""

from __future__ import annotations

import torch
from torch import Tensor


def within(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries whose indices are among ``others``.

    Parameters
    ----------
    indices
        ``[nnz]``, int32 or int64, sorted and unique.
    values
        ``[nnz]`` or rows ``[nnz, width]``, any dtype that `merge` takes.
    others
        ``[m]``, sorted and unique, the dtype of ``indices``.

    Returns
    -------
    indices, values
        New tensors, in the order and with the dtypes of the arguments.
    """
    kept = torch.isin(indices, others)
    return indices[kept], values[kept]


def without(
    indices: Tensor, values: Tensor, others: Tensor, left: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the entries whose indices are not among ``others``; otherwise like `within`.

    ``left`` is how many these are, where the caller knows, so that nobody has to wait for it.
    """
    kept = ~torch.isin(indices, others)
    return indices[kept], values[kept]
