"""Checks and conversions of the analysis functions' inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from sparcel._checks import FLOAT_DTYPES, check_type
from sparcel.errors import InputError
from sparcel.stream import SparseStream

Vector = Tensor | SparseStream
"""A vector of floats: a one-dimensional tensor, or a stream of scalar values."""


def checked_vector(vector: Vector, name: str) -> Tensor:
    """Return a vector as a tensor ``[size]``, or raise an `InputError` that names it.

    Tensors are not copied.
    """
    if isinstance(vector, SparseStream):
        vector = vector.to_dense()
    check_type(vector, Tensor, name, "it may be a SparseStream as well")
    values = vector.detach()
    if values.ndim != 1 or values.dtype not in FLOAT_DTYPES:
        raise InputError(
            f"{name} must be a one-dimensional float tensor, or a stream of scalar floats, got"
            f" {values.dtype} of shape {tuple(values.shape)}; flatten it first"
        )
    return values


def checked_alike(vectors: Sequence[Vector], what: str) -> list[Tensor]:
    """Return vectors as tensors, or raise `InputError` if there is none or sizes differ."""
    check_type(vectors, Iterable, what)
    tensors = [checked_vector(vector, f"{what}[{place}]") for place, vector in enumerate(vectors)]
    if not tensors:
        raise InputError(f"{what} must be at least one vector, got none")
    sizes = sorted({tensor.numel() for tensor in tensors})
    if len(sizes) > 1:
        raise InputError(f"{what} must all have one size, got sizes {sizes}")
    return tensors
