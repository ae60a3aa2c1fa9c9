"""Chooses the implementation of a kernel by the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from sparcel.device import GPUS
from sparcel.errors import warn
from sparcel.kernels.addition import Addition

P = ParamSpec("P")
T = TypeVar("T")


def by_device(
    definition: Callable[P, T], cpu: Callable[P, T], gpu: str | None = None
) -> Callable[P, T]:
    """Return a kernel that runs on tensors of any device.

    Parameters
    ----------
    definition
        The kernel in plain torch, for devices without a faster function.
    cpu
        A faster function with the same arguments and results for tensors on the CPU.
    gpu
        The name of one in `sparcel.kernels.gpu`, which is imported when a tensor on a GPU comes, if
        Triton is installed; None if the definition will do.
    """

    @wraps(definition)
    def kernel(*args: P.args, **kwargs: P.kwargs) -> T:
        place = _device_of(args[0])
        if place == "cpu":
            return cpu(*args, **kwargs)
        compiled = _on_gpu(gpu) if gpu and place in GPUS else None
        return (compiled or definition)(*args, **kwargs)

    return kernel


@lru_cache
def _on_gpu(name: str) -> Callable[..., Any] | None:
    """Return a function of `sparcel.kernels.gpu`; None without Triton, or with a broken one."""
    if find_spec("triton") is None:
        return None
    try:
        module = import_module("sparcel.kernels.gpu")
    except ImportError as error:
        warn(f"Triton cannot be imported, so GPUs run torch's operations, more slowly: {error}")
        return None
    function: Callable[..., Any] = getattr(module, name)
    return function


def _device_of(first: Any) -> str:
    """Return the type of the first argument's device, "" if it has tensors on several or none."""
    if isinstance(first, Tensor):
        return first.device.type
    if isinstance(first, Addition):
        return first.memory.device.type
    types = {_device_of(one) for one in first}
    return types.pop() if len(types) == 1 else ""
