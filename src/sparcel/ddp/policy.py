"""Which parameters are too small to be worth selecting from."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Policy = Callable[[str, Tensor], bool]
"""``(name, parameter) -> whether its gradient stays dense``; the same on all ranks."""


def stays_dense(name: str, parameter: Tensor) -> bool:
    """Keep biases, norms and tensors under 1024 elements dense: the default policy."""
    return parameter.ndim < 2 or parameter.numel() < 1024
