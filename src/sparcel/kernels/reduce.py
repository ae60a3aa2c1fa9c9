"""Merging of sparse vectors, and writing of sparse vectors into dense ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparcel.errors import InputError
from sparcel.kernels import cpu, reference
from sparcel.ops import Op


def merge(streams: Sequence[tuple[Tensor, Tensor]], op: Op) -> tuple[Tensor, Tensor]:
    """Reduce sorted streams to one.

    If several streams hold an index, ``op`` is applied from left to right in the order of
    ``streams``. No other order enters the result. float16 and bfloat16 are reduced in float32 and
    rounded once, at the end.

    Parameters
    ----------
    streams
        At least one pair of indices ``[nnz]``, sorted and unique, and values ``[nnz]`` or rows
        ``[nnz, width]``. All pairs agree in dtypes and width; values may be float16, bfloat16,
        float32, float64, int32 or int64 (integers wrap on overflow).
    op
        Combines the values of one index.

    Returns
    -------
    indices, values
        The union of the indices, and one value or row each; dtypes as in ``streams``.
    """
    if not streams:
        raise InputError("merge needs at least one stream, got none")
    if streams[0][0].is_cpu:
        return cpu.merge(streams, op)
    return reference.merge(streams, op)


def scatter_reduce(dense: Tensor, indices: Tensor, values: Tensor, op: Op) -> None:
    """Apply ``dense[i] = op(dense[i], v)`` in place for each index and its value or row.

    Parameters
    ----------
    dense
        ``[n]`` or rows ``[n, width]``, any dtype that `merge` takes.
    indices
        ``[nnz]``, unique, within ``dense``.
    values
        ``[nnz]`` or ``[nnz, width]``; converted to the dtype of ``dense`` before the operation.
    op
        Combines the values; float16 and bfloat16 are computed in float32.
    """
    implementation = cpu if dense.is_cpu else reference
    implementation.scatter_reduce(dense, indices, values, op)


def scatter(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """Apply ``dense[i] = v`` in place for each index and its value or row.

    Parameters
    ----------
    dense
        ``[n]`` or rows ``[n, width]``, any dtype that `merge` takes.
    indices
        ``[nnz]``, unique, within ``dense``.
    values
        ``[nnz]`` or ``[nnz, width]``; converted to the dtype of ``dense``.
    """
    implementation = cpu if dense.is_cpu else reference
    implementation.scatter(dense, indices, values)


def expand(dense: Tensor, indices: Tensor, values: Tensor, fill: float = 0) -> None:
    """Overwrite ``dense`` with a sparse vector: each index gets its value or row, others ``fill``.

    Parameters are those of `scatter`. ``fill`` is a value of the dtype of ``dense``.
    """
    implementation = cpu if dense.is_cpu else reference
    implementation.expand(dense, indices, values, fill)


def add_saturated(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """Apply ``dense[i] += v`` in place; an infinite sum becomes the largest finite number.

    Parameters
    ----------
    dense
        ``[n]``, float32 or float64.
    indices
        ``[nnz]``, unique, within ``dense``.
    values
        ``[nnz]``, the dtype of ``dense``.
    """
    implementation = cpu if dense.is_cpu else reference
    implementation.add_saturated(dense, indices, values)


def check_indices(indices: Tensor, size: int) -> int:
    """Find the first index that is not in [0, size) or not greater than the one before it.

    Parameters
    ----------
    indices
        ``[nnz]``, int32 or int64.
    size
        Number of coordinates.

    Returns
    -------
    int
        The position of that index, or -1 if there is none.
    """
    if indices.is_cpu:
        return cpu.check_indices(indices, size)
    return reference.check_indices(indices, size)
