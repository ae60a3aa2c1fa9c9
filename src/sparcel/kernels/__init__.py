"""The operations over whole vectors that everything else is built from.

Tensors are contiguous and one-dimensional unless a function says otherwise. Results are on the
device of the input. Indices are sorted; they are int32 if that can count the coordinates, else
int64. Magnitudes are ordered by the bits of ``|x|``, so NaN > Inf > finite numbers. Zeros are never
selected. `definitions` describes each kernel and says in plain torch what it means.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparcel import _cpu, device
from sparcel.kernels import cpu, cpu_ahead
from sparcel.kernels.addition import Addition as Addition
from sparcel.kernels.definitions import (
    ahead,
    few_bits,
    packing,
    reduce,
    regions,
    select,
    sets,
    squares,
)
from sparcel.kernels.definitions.ahead import AdamScale as AdamScale
from sparcel.kernels.definitions.ahead import Along as Along
from sparcel.kernels.definitions.ahead import AsAdam as AsAdam
from sparcel.kernels.definitions.ahead import scaled_as_adam as scaled_as_adam
from sparcel.kernels.definitions.common import index_dtype as index_dtype
from sparcel.kernels.definitions.common import magnitude_bits as magnitude_bits
from sparcel.kernels.definitions.common import widen as widen
from sparcel.kernels.definitions.few_bits import code_bytes as code_bytes
from sparcel.kernels.definitions.few_bits import scales_count as scales_count
from sparcel.kernels.definitions.packing import WORD as WORD
from sparcel.kernels.definitions.packing import packed_words as packed_words
from sparcel.kernels.definitions.regions import Collected as Collected
from sparcel.kernels.definitions.regions import Delivered as Delivered
from sparcel.kernels.definitions.regions import Entered as Entered
from sparcel.kernels.definitions.squares import CHUNK as CHUNK
from sparcel.kernels.dispatch import by_device
from sparcel.kernels.phase import Phase as Phase
from sparcel.kernels.phase import Regions as Regions
from sparcel.kernels.phase import Shares as Shares
from sparcel.kernels.phase import row_bytes as row_bytes

# One line a kernel, one column a type of device; callers choose nothing.
topk = by_device(select.topk, cpu.topk)
topk_chunked = by_device(select.topk_chunked, cpu.topk_chunked)
accumulate_topk = by_device(select.accumulate_topk, cpu.accumulate_topk)
threshold_select = by_device(select.threshold_select, cpu.threshold_select)
magnitude_histogram = by_device(select.magnitude_histogram, cpu.magnitude_histogram)
in_bin = by_device(select.in_bin, select.in_bin)
magnitude_ends = by_device(select.magnitude_ends, cpu.magnitude_ends, on_gpu=False)
bracket = by_device(select.bracket, cpu.bracket)
merge = by_device(reduce.merge, cpu.merge)
merge_messages = by_device(reduce.merge_messages, cpu.merge_messages, on_gpu=False)
scatter_reduce = by_device(reduce.scatter_reduce, cpu.scatter_reduce)
scatter = by_device(reduce.scatter, cpu.scatter)
expand = by_device(reduce.expand, cpu.expand)
add_saturated = by_device(reduce.add_saturated, _cpu.add_saturated)
saturate = by_device(reduce.saturate, cpu.saturate, on_gpu=False)
indices_fault = by_device(reduce.indices_fault, cpu.indices_fault)
average = by_device(reduce.average, reduce.average)
check_indices = by_device(reduce.check_indices, cpu.check_indices, on_gpu=False)
within = by_device(sets.within, cpu.within)
without = by_device(sets.without, cpu.without)
limited = by_device(few_bits.limited, cpu.limited)
quantize = by_device(few_bits.quantize, cpu.quantize)
dequantize = by_device(few_bits.dequantize, cpu.dequantize)
join_message = by_device(packing.join_message, cpu.join_message)
pack_indices = by_device(packing.pack_indices, cpu.pack_indices)
unpack_indices = by_device(packing.unpack_indices, cpu.unpack_indices)
enter = by_device(regions.enter, cpu.enter)
collect = by_device(regions.collect, cpu.collect)
deliver = by_device(regions.deliver, cpu.deliver)
sums_of_squares = by_device(squares.sums_of_squares, cpu.sums_of_squares, on_gpu=False)
moved = by_device(ahead.moved, cpu_ahead.moved, on_gpu=False)


def norm(x: Tensor) -> float:
    """Return the Euclidean norm of ``x`` (``[n]``, any float dtype), summed up in float64."""
    norm = math.sqrt(float(device.read(sums_of_squares([x]))))
    if math.isinf(norm) and x.dtype == torch.float64:  # no other dtype has squares that overflow
        peak = float(device.read(x.detach().abs().max()))
        if math.isfinite(peak):
            return peak * math.sqrt(float(device.read(sums_of_squares([x.detach() / peak]))))
    return norm
