"""Chooses the implementation of a kernel by the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from sparcel.device import GPUS, settle
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
        if place in GPUS:
            compiled: Callable[P, T] | None = _on_gpu(gpu) if gpu else None
            if compiled is not None:
                return compiled(*args, **kwargs)
            settle()  # to torch, an index out of bounds, from a corrupt message, is the end of CUDA
        return definition(*args, **kwargs)

    return kernel


@lru_cache
def _on_gpu(name: str) -> Callable[..., Any] | None:
    """Return a function of `sparcel.kernels.gpu`; None without Triton, or with a broken one."""
    module = _gpu_kernels()
    return None if module is None else getattr(module, name)


@lru_cache(maxsize=1)
def _gpu_kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    try:
        return import_module("sparcel.kernels.gpu")
    except ImportError as error:
        warn(f"Triton cannot be imported, so GPUs run torch's operations, more slowly: {error}")
        return None


def _device_of(first: Any) -> str:
    """Return the type of the first argument's device, "" if it has tensors on several or none."""
    if isinstance(first, Tensor):
        return first.device.type
    if isinstance(first, Addition):
        return first.memory.device.type
    types = {_device_of(one) for one in first}
    return types.pop() if len(types) == 1 else ""
