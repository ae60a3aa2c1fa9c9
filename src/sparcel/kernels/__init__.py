"""The operations over whole vectors that everything else is built from.

Tensors are contiguous and one-dimensional unless a function says otherwise. Results are on the
device of the input. Indices are sorted; they are int32 if that can count the coordinates, else
int64. Magnitudes are ordered by the bits of ``|x|``, so NaN > Inf > finite numbers. Zeros are never
selected. `reference` defines each kernel in plain torch. Tensors on the CPU use the compiled
kernels, tensors on other devices use the reference; callers choose nothing.
"""

from sparcel.kernels.addition import Addition
from sparcel.kernels.packing import pack_indices, packed_words, unpack_indices
from sparcel.kernels.qsgd import dequantize, quantize
from sparcel.kernels.reduce import (
    add_saturated,
    check_indices,
    expand,
    merge,
    scatter,
    scatter_reduce,
)
from sparcel.kernels.reference import CHUNK, index_dtype, magnitude_bits
from sparcel.kernels.select import (
    accumulate_topk,
    magnitude_histogram,
    threshold_select,
    topk,
    topk_chunked,
)
from sparcel.kernels.sets import within, without
from sparcel.kernels.squares import norm, sums_of_squares

__all__ = [
    "CHUNK",
    "Addition",
    "accumulate_topk",
    "add_saturated",
    "check_indices",
    "dequantize",
    "expand",
    "index_dtype",
    "magnitude_bits",
    "magnitude_histogram",
    "merge",
    "norm",
    "pack_indices",
    "packed_words",
    "quantize",
    "scatter",
    "scatter_reduce",
    "sums_of_squares",
    "threshold_select",
    "topk",
    "topk_chunked",
    "unpack_indices",
    "within",
    "without",
]
