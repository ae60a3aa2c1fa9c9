"""Differences and intersections of sparse vectors."""

from __future__ import annotations

from torch import Tensor

from sparcel.kernels import cpu, reference


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
    if indices.is_cpu:
        return cpu.within(indices, values, others)
    return reference.within(indices, values, others)


def without(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries whose indices are not among ``others``; otherwise like `within`."""
    if indices.is_cpu:
        return cpu.without(indices, values, others)
    return reference.without(indices, values, others)
