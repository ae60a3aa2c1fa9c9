"""Methods of other papers that are settings of the schemes here, under their known names."""

from __future__ import annotations

from collections.abc import Sequence

from sparcel.formats import Format
from sparcel.schemes.base import Scheme
from sparcel.schemes.dense import Dense
from sparcel.schemes.hierarchical import Hierarchical
from sparcel.schemes.topk import TopK
from sparcel.selectors import Selector


def hitopk(
    density: float = 0.01,
    selector: str | Selector = "exact",
    ranks_per_node: int | None = None,
    warmup: Sequence[float] = (),
    warmup_steps: int | None = None,
    format: str | Format = "raw",
    wire: str | None = None,
) -> Scheme:
    """HiTopKComm: dense sums inside the node, top-k and all-gather across nodes.

    The paper selects with ``selector="mstopk"``. ``wire`` is the dtype of what travels inside the
    node, and ``format`` the format of what travels across. Source: CommLib, Algorithm 2.
    """
    inner = TopK(
        density, warmup, warmup_steps, format=format, selector=selector, algorithm="allgather"
    )
    return Hierarchical(inner, ranks_per_node, wire)


def torus2d(ranks_per_node: int | None = None, wire: str | None = None) -> Scheme:
    """2D-torus all-reduce: dense sums inside the node, across nodes, inside the node again.

    ``wire`` is the dtype of what travels, inside nodes and across. Source: CommLib, section 5.3
    (2DTAR), after Mikami et al. and Cho et al.
    """
    return Hierarchical(Dense(wire), ranks_per_node, wire)


def mstopk(
    density: float = 0.01,
    warmup: Sequence[float] = (),
    warmup_steps: int | None = None,
    format: str | Format = "raw",
) -> Scheme:
    """All-gather of MSTopK's selections. Source: CommLib, Algorithm 1 and section 5.5."""
    return TopK(
        density, warmup, warmup_steps, format=format, selector="mstopk", algorithm="allgather"
    )


def dgc(
    density: float = 0.001,
    momentum: float = 0.9,
    clip: float | None = None,
    warmup: Sequence[float] = (),
    warmup_steps: int | None = None,
    format: str | Format = "raw",
) -> Scheme:
    """Deep Gradient Compression: momentum correction, clipping, warm-up.

    It has a momentum of 0.9 unless another is given, so the optimiser must have none for the
    parameters that are made sparse: see `Sparsifier`. The paper warms up with
    ``[0.25, 0.0625, 0.015625, 0.004]``, an epoch each, and estimates the threshold of a selection
    from a sample. Here selections are exact, which takes less time on CPUs.
    Source: Lin et al. 2018.
    """
    return TopK(density, warmup, warmup_steps, momentum, clip, format, algorithm="allgather")
