"""The kernels for GPUs, in Triton; `sparcel.kernels.definitions` describes them.

Each module has the functions of the definitions' module of the same name. A function queues its
work on the current stream. It waits for the GPU only where the length of its result depends on the
data, in one `sparcel.device.read`. Offsets into vectors are int64. Sums and orders depend on the
data alone, not on which program comes first, so every run gives the same bits.
"""

from sparcel.kernels.gpu.few_bits import dequantize, limited, quantize
from sparcel.kernels.gpu.mstopk import mstopk
from sparcel.kernels.gpu.packing import pack_indices, unpack_indices
from sparcel.kernels.gpu.reduce import (
    add_saturated,
    expand,
    indices_fault,
    merge,
    scatter,
    scatter_reduce,
)
from sparcel.kernels.gpu.select import (
    accumulate_topk,
    in_bin,
    magnitude_histogram,
    threshold_select,
    topk,
    topk_chunked,
)
from sparcel.kernels.gpu.sets import within, without

__all__ = [
    "accumulate_topk",
    "add_saturated",
    "dequantize",
    "expand",
    "in_bin",
    "indices_fault",
    "limited",
    "magnitude_histogram",
    "merge",
    "mstopk",
    "pack_indices",
    "quantize",
    "scatter",
    "scatter_reduce",
    "threshold_select",
    "topk",
    "topk_chunked",
    "unpack_indices",
    "within",
    "without",
]
