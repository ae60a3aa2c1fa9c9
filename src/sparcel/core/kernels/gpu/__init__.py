"""The kernels for GPUs, in Triton; `sparcel.core.kernels.definitions` describes them.

Each module has the functions of the definitions' module of the same name. A function queues its
work on the current stream. It waits for the GPU only where the length of its result depends on the
data, in one `device.read`. Offsets into vectors are int64. Sums and orders depend on the
data alone, not on which program comes first, so every run gives the same bits.
"""

from sparcel.core.kernels.gpu.few_bits import dequantize as dequantize
from sparcel.core.kernels.gpu.few_bits import limited as limited
from sparcel.core.kernels.gpu.few_bits import quantize as quantize
from sparcel.core.kernels.gpu.packing import join_message as join_message
from sparcel.core.kernels.gpu.packing import pack_indices as pack_indices
from sparcel.core.kernels.gpu.packing import unpack_indices as unpack_indices
from sparcel.core.kernels.gpu.reduce import add_saturated as add_saturated
from sparcel.core.kernels.gpu.reduce import average as average
from sparcel.core.kernels.gpu.reduce import expand as expand
from sparcel.core.kernels.gpu.reduce import indices_fault as indices_fault
from sparcel.core.kernels.gpu.reduce import merge as merge
from sparcel.core.kernels.gpu.reduce import scatter as scatter
from sparcel.core.kernels.gpu.reduce import scatter_reduce as scatter_reduce
from sparcel.core.kernels.gpu.reduce import within as within
from sparcel.core.kernels.gpu.reduce import without as without
from sparcel.core.kernels.gpu.regions import collect as collect
from sparcel.core.kernels.gpu.regions import deliver as deliver
from sparcel.core.kernels.gpu.regions import enter as enter
from sparcel.core.kernels.gpu.select import accumulate_topk as accumulate_topk
from sparcel.core.kernels.gpu.select import bracket as bracket
from sparcel.core.kernels.gpu.select import in_bin as in_bin
from sparcel.core.kernels.gpu.select import magnitude_histogram as magnitude_histogram
from sparcel.core.kernels.gpu.select import threshold_select as threshold_select
from sparcel.core.kernels.gpu.select import topk as topk
from sparcel.core.kernels.gpu.select import topk_chunked as topk_chunked
