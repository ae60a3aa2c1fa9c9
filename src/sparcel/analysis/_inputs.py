"""Checks and conversions of the analysis functions' inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparcel._checks import FLOAT_DTYPES
from sparcel.errors import InputError
from sparcel.stream import SparseStream

Vector = Tensor | SparseStream
"""A vector of floats: a one-dimensional tensor, or a stream of scalar values."""


def dense(vector: Vector) -> Tensor:
    """Return a vector as a tensor ``[size]``, or raise `InputError`; tensors are not copied."""
    values = vector.to_dense() if isinstance(vector, SparseStream) else vector.detach()
    if values.ndim != 1 or values.dtype not in FLOAT_DTYPES:
        raise InputError(
            f"a vector is a one-dimensional float tensor, or a stream of scalar floats, got"
            f" {values.dtype} of shape {tuple(values.shape)}; flatten it first"
        )
    return values


def dense_alike(vectors: Sequence[Vector], what: str) -> list[Tensor]:
    """Return vectors as tensors, or raise `InputError` if there is none or sizes differ."""
    tensors = [dense(vector) for vector in vectors]
    if not tensors:
        raise InputError(f"{what} must be at least one vector, got none")
    sizes = sorted({tensor.numel() for tensor in tensors})
    if len(sizes) > 1:
        raise InputError(f"{what} must all have one size, got sizes {sizes}")
    return tensors
