"""The operations over whole vectors that everything else is built from.

Tensors are contiguous and one-dimensional unless a function says otherwise. Results are on the
device of the input. Indices are sorted; they are int32 if that can count the coordinates, else
int64. Magnitudes are ordered by the bits of ``|x|``, so NaN > Inf > finite numbers. Zeros are never
selected. `definitions` describes each kernel and says in plain torch what it means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.core import device
from sparcel.core.device import GPUS, settle
from sparcel.core.kernels import cpu
from sparcel.core.kernels.definitions import few_bits, optim, packing, reduce, regions, select
from sparcel.core.kernels.definitions.few_bits import code_bytes as code_bytes
from sparcel.core.kernels.definitions.few_bits import scales_count as scales_count
from sparcel.core.kernels.definitions.optim import CHUNK as CHUNK
from sparcel.core.kernels.definitions.optim import AdamScale as AdamScale
from sparcel.core.kernels.definitions.optim import Along as Along
from sparcel.core.kernels.definitions.optim import AsAdam as AsAdam
from sparcel.core.kernels.definitions.optim import scaled_as_adam as scaled_as_adam
from sparcel.core.kernels.definitions.packing import WORD as WORD
from sparcel.core.kernels.definitions.packing import packed_words as packed_words
from sparcel.core.kernels.definitions.reduce import widen as widen
from sparcel.core.kernels.definitions.regions import Collected as Collected
from sparcel.core.kernels.definitions.regions import Delivered as Delivered
from sparcel.core.kernels.definitions.regions import Entered as Entered
from sparcel.core.kernels.definitions.select import Addition as Addition
from sparcel.core.kernels.definitions.select import index_dtype as index_dtype
from sparcel.core.kernels.definitions.select import magnitude_bits as magnitude_bits
from sparcel.core.kernels.regions import Densities as Densities
from sparcel.core.kernels.regions import Leg as Leg
from sparcel.core.kernels.regions import Regions as Regions
from sparcel.core.kernels.regions import row_bytes as row_bytes
from sparcel.errors import warn

P = ParamSpec("P")
T = TypeVar("T")


def by_device(definition: Callable[P, T], cpu: Callable[P, T]) -> Callable[P, T]:
    """Return a kernel that runs on tensors of any device.

    For tensors on a GPU it is the function of this name in `kernels.gpu`, if there is one
    and Triton is installed.

    Parameters
    ----------
    definition
        The kernel in plain torch, for devices without a faster function.
    cpu
        A faster function with the same arguments and results for tensors on the CPU.
    """

    @wraps(definition)
    def kernel(*args: P.args, **kwargs: P.kwargs) -> T:
        place = _device_of(args[0])
        if place == "cpu":
            return cpu(*args, **kwargs)
        if place in GPUS:
            if compiled := getattr(_gpu_kernels(), definition.__name__, None):
                return cast(T, compiled(*args, **kwargs))
            settle()  # to torch, an index out of bounds, from a corrupt message, is the end of CUDA
        return definition(*args, **kwargs)

    return kernel


@lru_cache(maxsize=1)
def _gpu_kernels() -> ModuleType | None:
    """Return `kernels.gpu`; None without Triton, or with a broken one."""
    if find_spec("triton") is None:
        return None
    try:
        return import_module("sparcel.core.kernels.gpu")
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


# One line a kernel, one column a type of device; callers choose nothing.
topk = by_device(select.topk, cpu.topk)
topk_chunked = by_device(select.topk_chunked, cpu.topk_chunked)
accumulate_topk = by_device(select.accumulate_topk, cpu.accumulate_topk)
threshold_select = by_device(select.threshold_select, cpu.threshold_select)
magnitude_histogram = by_device(select.magnitude_histogram, cpu.magnitude_histogram)
in_bin = by_device(select.in_bin, select.in_bin)
magnitude_ends = by_device(select.magnitude_ends, cpu.magnitude_ends)
bracket = by_device(select.bracket, cpu.bracket)
merge = by_device(reduce.merge, cpu.merge)
merge_messages = by_device(reduce.merge_messages, cpu.merge_messages)
scatter_reduce = by_device(reduce.scatter_reduce, cpu.scatter_reduce)
scatter = by_device(reduce.scatter, cpu.scatter)
expand = by_device(reduce.expand, cpu.expand)
add_saturated = by_device(reduce.add_saturated, _cpu.add_saturated)
saturate = by_device(reduce.saturate, cpu.saturate)
indices_fault = by_device(reduce.indices_fault, cpu.indices_fault)
average = by_device(reduce.average, reduce.average)
check_indices = by_device(reduce.check_indices, cpu.check_indices)
within = by_device(reduce.within, cpu.within)
without = by_device(reduce.without, cpu.without)
limited = by_device(few_bits.limited, cpu.limited)
quantize = by_device(few_bits.quantize, cpu.quantize)
dequantize = by_device(few_bits.dequantize, cpu.dequantize)
join_message = by_device(packing.join_message, cpu.join_message)
pack_indices = by_device(packing.pack_indices, cpu.pack_indices)
unpack_indices = by_device(packing.unpack_indices, cpu.unpack_indices)
enter = by_device(regions.enter, cpu.enter)
collect = by_device(regions.collect, cpu.collect)
deliver = by_device(regions.deliver, cpu.deliver)
sums_of_squares = by_device(optim.sums_of_squares, cpu.sums_of_squares)
moved = by_device(optim.moved, cpu.moved)


def norm(x: Tensor) -> float:
    """Return the Euclidean norm of ``x`` (``[n]``, any float dtype), summed up in float64."""
    norm = math.sqrt(float(device.read(sums_of_squares([x]))))
    if math.isinf(norm) and x.dtype == torch.float64:  # no other dtype has squares that overflow
        peak = float(device.read(x.detach().abs().max()))
        if math.isfinite(peak):
            return peak * math.sqrt(float(device.read(sums_of_squares([x.detach() / peak]))))
    return norm
