"""The bits of magnitudes, for kernels: integers that order like |x|."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def magnitude_bits(x):
    """Return the bits of ``|x|``: int64 for float64, else int32."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    elif x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return bits


def bits_width(dtype: torch.dtype) -> int:
    """Return how many bits a magnitude has."""
    return 8 * dtype.itemsize - 1


def infinite_bits(dtype: torch.dtype) -> int:
    """Return the bits of infinity; those of NaN are larger."""
    infinite = torch.tensor(torch.inf, dtype=dtype, device="cpu")
    return int(infinite.view(_INTEGERS[dtype.itemsize]))


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(threshold: float, x: Tensor) -> int:
    """Return the bits of a magnitude, rounded to the dtype of ``x``."""
    rounded = torch.tensor(threshold, dtype=x.dtype, device="cpu")
    return int(rounded.view(_INTEGERS[x.dtype.itemsize]))
