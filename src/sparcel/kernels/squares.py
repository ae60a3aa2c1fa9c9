"""Sums of squares, and norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from sparcel.kernels import cpu, reference


def sums_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of each vector, summed up in float64.

    On the CPU the sums depend neither on the number of threads nor on the instruction set. That of
    a vector is the sum of those of its chunks, one after another, so whoever cuts vectors at
    multiples of `sparcel.kernels.CHUNK` gets the same bits.

    Parameters
    ----------
    vectors
        Vectors of any length, each of any float dtype, all on one device for few launches.

    Returns
    -------
    Tensor
        float64 ``[len(vectors)]``, on the device of the first vector.
    """
    if all(vector.is_cpu for vector in vectors):
        return cpu.sums_of_squares(vectors)
    return reference.sums_of_squares(vectors)


def norm(x: Tensor) -> float:
    """Return the Euclidean norm of ``x`` (``[n]``, any float dtype), summed up in float64."""
    return math.sqrt(float(sums_of_squares([x])))
