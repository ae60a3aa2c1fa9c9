"""sparcel: sparse collectives for data-parallel training, native to PyTorch."""

from sparcel.api import all_gather, all_reduce, broadcast, reduce_scatter
from sparcel.comm import simulate
from sparcel.ddp import attach
from sparcel.ops import Op
from sparcel.schemes import Hierarchical, scheme
from sparcel.selectors import topk
from sparcel.stream import SparseStream

__all__ = [
    "Hierarchical",
    "Op",
    "SparseStream",
    "all_gather",
    "all_reduce",
    "attach",
    "broadcast",
    "reduce_scatter",
    "scheme",
    "simulate",
    "topk",
]
