"""Weights that a trainer yields one by one, gathered from all ranks, for a publisher."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor


def on_host(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copy weights to the host as they come; floats wider than ``dtype`` become ``dtype``.

    The weights are walked to their end even if that fails: other ranks walk with this one.
    """
    coming = iter(weights)
    try:
        return {name: _copied(tensor, dtype) for name, tensor in coming}
    finally:
        deque(coming, maxlen=0)


def _copied(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    wider = dtype is not None and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
    return tensor.detach().to("cpu", dtype if wider else tensor.dtype, copy=True)
