"""Merging and filtering of sparse vectors, and writing of them into dense ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparcel.core.ops import Op
from sparcel.errors import InputError


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
    # A stable sort keeps the contributions of one index in the order of the streams.
    indices, order = torch.cat([indices for indices, _ in streams]).sort(stable=True)
    values = torch.cat([values for _, values in streams])[order]
    merged, counts = torch.unique_consecutive(indices, return_counts=True)
    first = counts.cumsum(0) - counts
    result = widen(values[first])
    longest = int(counts.max()) if counts.numel() else 0
    for contribution in range(1, longest):
        slots = (counts > contribution).nonzero().view(-1)
        added = widen(values[first[slots] + contribution])
        result[slots] = op.apply(result[slots], added)
    return merged, result.to(values.dtype)


def merge_messages(
    messages: Sequence[Sequence[Tensor]], size: int, dtype: int, op: Op
) -> tuple[Tensor, Tensor, bool] | None:
    """Do what `merge` does with sparse messages in raw formats, as they are.

    Parameters
    ----------
    messages
        Of streams of ``size``; see `sparcel.formats`.
    dtype
        The number that headers have for the dtype of the values.

    Returns
    -------
    tuple
        Indices, values, and whether all vectors were finite; None where messages must be decoded,
        as here, and for any that are something else.
    """
    return None


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
    positions = indices.long()
    reduced = op.apply(widen(dense[positions]), widen(values.to(dense.dtype)))
    dense[positions] = reduced.to(dense.dtype)


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
    dense[indices.long()] = values.to(dense.dtype)


def expand(dense: Tensor, indices: Tensor, values: Tensor, fill: float = 0) -> None:
    """Overwrite ``dense`` with a sparse vector: each index gets its value or row, others ``fill``.

    Parameters are those of `scatter`. ``fill`` is a value of the dtype of ``dense``.
    """
    dense.fill_(fill)
    scatter(dense, indices, values)


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
    positions, most = indices.long(), torch.finfo(dense.dtype).max
    dense[positions] = (dense[positions] + values).clamp(-most, most)


def saturate(dense: Tensor) -> None:
    """Replace infinite numbers of a vector, of any float dtype, by the largest finite ones."""
    most = torch.finfo(dense.dtype).max
    dense.clamp_(-most, most)


def average(total: Tensor, divisor: float, out: Tensor | None = None) -> Tensor:
    """Return ``total / divisor``, on a GPU with the bits of the CPU.

    There torch multiplies by the reciprocal of a number, but divides by a tensor. Half precision,
    which may not hold the divisor, is left to torch.

    Parameters
    ----------
    total
        Contiguous, any float dtype.
    out
        Where to write it, like ``total``, or ``total`` itself.
    """
    exact = total.dtype in (torch.float32, torch.float64)
    return torch.div(total, total.new_full((), divisor) if exact else divisor, out=out)


def indices_fault(indices: Tensor, size: int) -> bool | Tensor:
    """Tell, on the indices' device, whether `check_indices` finds one."""
    return _wrong(indices, size).any()


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
    positions = _wrong(indices, size).nonzero()
    return int(positions[0]) if positions.numel() else -1


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


def _wrong(indices: Tensor, size: int) -> Tensor:
    wrong = (indices < 0) | (indices >= size)
    wrong[1:] |= indices[1:] <= indices[:-1]
    return wrong


_WIDE_DTYPE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def widen(values: Tensor) -> Tensor:
    """Return values of half precision as float32, others unchanged."""
    return values.to(_WIDE_DTYPE.get(values.dtype, values.dtype))
