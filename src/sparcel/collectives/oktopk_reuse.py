"""Ok-Topk by the paper's own rules: boundaries and threshold are reused for several steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from sparcel import device, kernels
from sparcel.collectives._counts import gather_integers
from sparcel.collectives._global_topk import global_topk
from sparcel.collectives.gtopk import GlobalTopk
from sparcel.collectives.oktopk import gather_winners, selectable
from sparcel.collectives.reduce_scatter import reduce_regions
from sparcel.collectives.regions import average_boundaries
from sparcel.device import finite_flag
from sparcel.stream import SparseStream
from sparcel.wire import Wire, collective


@dataclass(frozen=True)
class Estimates:
    """Estimates that one call of `oktopk_reuse` makes and later calls use.

    ``boundaries`` are the P+1 boundaries of the regions. ``threshold`` is the smallest magnitude
    that wins; it was chosen so that ``k`` coordinates win. None means unknown.
    """

    boundaries: tuple[int, ...] | None = None
    threshold: float | None = None
    k: int = 0


@collective
def oktopk_reuse(
    stream: SparseStream,
    wire: Wire,
    k: int,
    estimates: Estimates,
    renew_boundaries: bool,
    renew_threshold: bool,
    max_nnz: int | None = None,
) -> tuple[GlobalTopk, Estimates]:
    """Sum over all ranks and keep about k magnitudes, by the paper's own rules.

    Parameters
    ----------
    stream, k, max_nnz
        As for `oktopk`.
    estimates
        The result of an earlier call. This and the next two must be the same on all ranks.
    renew_boundaries, renew_threshold
        Whether to estimate anew. Estimates that are unknown or do not fit this call are always
        renewed: boundaries of other ranks or another size, a threshold of another ``k``.

    Returns
    -------
    The sum, as from `oktopk`, and the estimates for the next call. If the threshold was renewed,
    the total holds k coordinates. Otherwise it holds all magnitudes from the threshold on; if these
    are more than ⌈4k/3⌉, each region keeps its largest, in proportion. If the sum is not finite,
    the estimates are returned unchanged.

    Source: Ok-Topk, Algorithm 1. Boundaries are averaged over the ranks, and blocks are balanced if
    one is above four times the mean. Unlike the paper, this function finds the k-th largest without
    gathering, and caps the number of winners.
    """
    own, boundaries, threshold = selectable(stream), estimates.boundaries, estimates.threshold
    fits = boundaries is not None and (len(boundaries), boundaries[-1]) == (wire.size + 1, own.size)
    if renew_boundaries or boundaries is None or not fits:
        boundaries = tuple(average_boundaries(own, wire.comm))
    region = reduce_regions(own, boundaries, wire, max_nnz=max_nnz)
    if renew_threshold or threshold is None or estimates.k != k:
        winners = global_topk(region.values, wire.comm, k, own.size, region.finite)
        counts, threshold, finite = winners.counts, winners.threshold, winners.finite
    else:
        counts, finite = _count_from(threshold, region, wire)
        counts = _capped(counts, -(-4 * k // 3))
    if not finite:
        return GlobalTopk.void(own), estimates
    evened = wire.size * max(counts) > 4 * sum(counts)
    return gather_winners(region, counts, boundaries, wire, evened), Estimates(
        boundaries, threshold, k
    )


def _count_from(threshold: float, region: SparseStream, wire: Wire) -> tuple[list[int], bool]:
    """Count each rank's magnitudes from the threshold on, and tell whether all are finite."""
    selected, _ = kernels.threshold_select(region.values, threshold)
    finite = device.truth(region.finite & finite_flag(region.values))
    counts, finite = gather_integers(torch.tensor([selected.numel()]), wire.comm, 1, finite)
    return torch.cat(counts).tolist(), finite


def _capped(counts: Sequence[int], cap: int) -> list[int]:
    """Lower counts in proportion, so that they sum to no more than ``cap``."""
    ends = list(accumulate(counts))
    total = ends[-1]
    if total <= cap:
        return list(counts)
    return [high - low for low, high in pairwise([0, *(end * cap // total for end in ends)])]
