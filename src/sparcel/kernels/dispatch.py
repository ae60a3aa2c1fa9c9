"""Chooses the implementation of a kernel by the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

from torch import Tensor

from sparcel.device import GPUS, settle
from sparcel.errors import warn
from sparcel.kernels.addition import Addition

P = ParamSpec("P")
T = TypeVar("T")


def by_device(
    definition: Callable[P, T], cpu: Callable[P, T], on_gpu: bool = True
) -> Callable[P, T]:
    """Return a kernel that runs on tensors of any device.

    Parameters
    ----------
    definition
        The kernel in plain torch, for devices without a faster function.
    cpu
        A faster function with the same arguments and results for tensors on the CPU.
    on_gpu
        Whether `sparcel.kernels.gpu` has one of the definition's name, for tensors on a GPU if
        Triton is installed.
    """

    @wraps(definition)
    def kernel(*args: P.args, **kwargs: P.kwargs) -> T:
        place = _device_of(args[0])
        if place == "cpu":
            return cpu(*args, **kwargs)
        if place in GPUS:
            if on_gpu and (compiled := _gpu_kernels()) is not None:
                return cast(T, getattr(compiled, definition.__name__)(*args, **kwargs))
            settle()  # to torch, an index out of bounds, from a corrupt message, is the end of CUDA
        return definition(*args, **kwargs)

    return kernel


@lru_cache(maxsize=1)
def _gpu_kernels() -> ModuleType | None:
    """Return `sparcel.kernels.gpu`; None without Triton, or with a broken one."""
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
