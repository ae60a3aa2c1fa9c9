"""What several kernels need: the dtypes of indices and sums, and the bits of magnitudes."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS_DTYPE = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_WIDE_DTYPE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def index_dtype(size: int) -> torch.dtype:
    """Return int32 if it can count ``size`` coordinates, else int64."""
    return torch.int32 if size <= 2**31 - 1 else torch.int64


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the bits of ``|x|`` as integers of the same width; they order like magnitudes."""
    dtype = _BITS_DTYPE[x.element_size()]
    return x.view(dtype) & torch.iinfo(dtype).max


def widen(values: Tensor) -> Tensor:
    """Return values of half precision as float32, others unchanged."""
    return values.to(_WIDE_DTYPE.get(values.dtype, values.dtype))
