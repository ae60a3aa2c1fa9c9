"""The operations over whole vectors that everything else is built from.

Tensors are contiguous and one-dimensional unless a function says otherwise. Results are on the
device of the input. Indices are sorted; they are int32 if that can count the coordinates, else
int64. Magnitudes are ordered by the bits of ``|x|``, so NaN > Inf > finite numbers. Zeros are never
selected. `definitions` describes each kernel and says in plain torch what it means.
"""

from __future__ import annotations

import math

from torch import Tensor

from sparcel import _cpu
from sparcel.kernels import cpu
from sparcel.kernels.addition import Addition as Addition
from sparcel.kernels.definitions import few_bits, packing, reduce, select, sets, squares
from sparcel.kernels.definitions.common import index_dtype as index_dtype
from sparcel.kernels.definitions.common import magnitude_bits as magnitude_bits
from sparcel.kernels.definitions.common import widen as widen
from sparcel.kernels.definitions.few_bits import scales_count as scales_count
from sparcel.kernels.definitions.packing import packed_words as packed_words
from sparcel.kernels.definitions.squares import CHUNK as CHUNK
from sparcel.kernels.dispatch import by_device

# One line a kernel, one column a type of device; callers choose nothing.
topk = by_device(select.topk, cpu=cpu.topk)
topk_chunked = by_device(select.topk_chunked, cpu=cpu.topk_chunked)
accumulate_topk = by_device(select.accumulate_topk, cpu=cpu.accumulate_topk)
threshold_select = by_device(select.threshold_select, cpu=cpu.threshold_select)
magnitude_histogram = by_device(select.magnitude_histogram, cpu=cpu.magnitude_histogram)
merge = by_device(reduce.merge, cpu=cpu.merge)
scatter_reduce = by_device(reduce.scatter_reduce, cpu=cpu.scatter_reduce)
scatter = by_device(reduce.scatter, cpu=cpu.scatter)
expand = by_device(reduce.expand, cpu=cpu.expand)
add_saturated = by_device(reduce.add_saturated, cpu=_cpu.add_saturated)
check_indices = by_device(reduce.check_indices, cpu=cpu.check_indices)
within = by_device(sets.within, cpu=cpu.within)
without = by_device(sets.without, cpu=cpu.without)
limited = by_device(few_bits.limited, cpu=cpu.limited)
quantize = by_device(few_bits.quantize, cpu=cpu.quantize)
dequantize = by_device(few_bits.dequantize, cpu=cpu.dequantize)
pack_indices = by_device(packing.pack_indices, cpu=cpu.pack_indices)
unpack_indices = by_device(packing.unpack_indices, cpu=cpu.unpack_indices)
sums_of_squares = by_device(squares.sums_of_squares, cpu=cpu.sums_of_squares)


def norm(x: Tensor) -> float:
    """Return the Euclidean norm of ``x`` (``[n]``, any float dtype), summed up in float64."""
    return math.sqrt(float(sums_of_squares([x])))
