"""Chooses the implementation of a kernel by the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from sparcel.kernels.addition import Addition

P = ParamSpec("P")
T = TypeVar("T")


def by_device(definition: Callable[P, T], **compiled: Callable[P, T]) -> Callable[P, T]:
    """Return a kernel that runs on tensors of any device.

    Parameters
    ----------
    definition
        The kernel in plain torch, for devices without a faster function.
    compiled
        Faster functions with the same arguments and results, by the device's type: ``cpu=…``.
    """

    @wraps(definition)
    def kernel(*args: P.args, **kwargs: P.kwargs) -> T:
        return compiled.get(_device_of(args[0]), definition)(*args, **kwargs)

    return kernel


def _device_of(first: Any) -> str:
    """Return the type of the first argument's device, "" if it has tensors on several or none."""
    if isinstance(first, Tensor):
        return first.device.type
    if isinstance(first, Addition):
        return first.memory.device.type
    types = {_device_of(one) for one in first}
    return types.pop() if len(types) == 1 else ""
