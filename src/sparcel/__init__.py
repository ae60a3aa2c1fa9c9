"""sparcel: sparse collectives for data-parallel training, native to PyTorch."""

from importlib.metadata import version

from sparcel.api import all_gather, all_reduce, broadcast, reduce_scatter
from sparcel.comm import simulate
from sparcel.ddp import attach
from sparcel.ops import Op
from sparcel.schemes import Hierarchical, scheme
from sparcel.selectors import topk
from sparcel.stream import SparseStream
from sparcel.training import Handle

__version__ = version("sparcel")

__all__ = [
    "Handle",
    "Hierarchical",
    "Op",
    "SparseStream",
    "__version__",
    "all_gather",
    "all_reduce",
    "attach",
    "broadcast",
    "reduce_scatter",
    "scheme",
    "simulate",
    "topk",
]
