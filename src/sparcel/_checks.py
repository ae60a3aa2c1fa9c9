"""Checks of tensors that become part of a stream."""

from __future__ import annotations

import torch
from torch import Tensor

from sparcel import kernels
from sparcel.errors import InputError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VALUE_DTYPES = (*FLOAT_DTYPES, torch.int32, torch.int64)


def check_values(values: Tensor, size: int, dense: bool) -> None:
    """Raise `InputError` unless ``values`` can be the values of a stream of ``size``."""
    if values.dtype not in VALUE_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in VALUE_DTYPES)
        raise InputError(f"values must be one of {names}, got {values.dtype}")
    if values.ndim not in (1, 2):
        raise InputError(
            f"values must be [nnz], or rows [nnz, width], got shape {tuple(values.shape)}"
        )
    if size < 0:
        raise InputError(f"size must be at least 0, got {size}")
    if dense and values.shape[0] != size:
        raise InputError(
            f"a dense stream of size {size} needs {size} values, got {values.shape[0]}"
        )


def checked_indices(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """Return the indices in the dtype and layout of a stream of ``size``, or raise `InputError`."""
    if indices.dtype not in (torch.int32, torch.int64):
        raise InputError(f"indices must be int32 or int64, got {indices.dtype}")
    if indices.ndim != 1 or indices.numel() != values.shape[0]:
        raise InputError(
            f"indices must be one-dimensional, one per value: got shape {tuple(indices.shape)}"
            f" for {values.shape[0]} values"
        )
    if indices.device != values.device:
        raise InputError(f"indices are on {indices.device}, values on {values.device}")
    dtype = kernels.index_dtype(size)
    # The dtype must hold both the given indices and the size that they are compared with.
    indices = indices.to(torch.promote_types(indices.dtype, dtype)).contiguous()
    position = kernels.check_indices(indices, size)
    if position >= 0:
        found = int(indices[position])
        if not 0 <= found < size:
            raise InputError(f"index {found} at position {position} is outside [0, {size})")
        raise InputError(
            f"indices must be strictly increasing, got {int(indices[position - 1])} and then"
            f" {found} at position {position}; sort them and merge duplicates first"
        )
    return indices.to(dtype)


def all_finite(values: Tensor) -> bool:
    """Tell whether all values are finite, without allocating a mask as large as ``values``."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
