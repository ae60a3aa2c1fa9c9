"""Ok-Topk by the paper's own rules: boundaries and a threshold that are estimated now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from sparcel import kernels
from sparcel._checks import all_finite
from sparcel.collectives._counts import gather_numbers
from sparcel.collectives._global_topk import global_topk
from sparcel.collectives._regions import average_boundaries
from sparcel.collectives.oktopk import gather_winners, selectable, void_like
from sparcel.collectives.reduce_scatter import reduce_regions
from sparcel.stream import SparseStream
from sparcel.wire import Wire


@dataclass(frozen=True)
class Estimates:
    """What `oktopk_reuse` learnt in one call and uses in later ones.

    ``boundaries`` are the P+1 of the regions; ``threshold`` is the magnitude from which a sum
    wins, made to let ``k`` through. None: unknown.
    """

    boundaries: list[int] | None = None
    threshold: float | None = None
    k: int = 0


def oktopk_reuse(
    stream: SparseStream,
    wire: Wire,
    k: int,
    estimates: Estimates,
    renew_boundaries: bool,
    renew_threshold: bool,
    max_nnz: int | None = None,
) -> tuple[SparseStream, Estimates]:
    """Sum over all ranks and keep about k magnitudes, by the paper's own rules.

    Parameters
    ----------
    stream, k, max_nnz
        As for `oktopk`.
    estimates
        Of an earlier call, the same on all ranks, as are the next two.
    renew_boundaries, renew_threshold
        Whether to estimate anew; what is unknown, or of other ranks or another size, always is.

    Returns
    -------
    The sum of what won, as from `oktopk`: k coordinates where the threshold was renewed, elsewhere
    those from the threshold on, and of these the largest of every region where they are more than
    ⌈4k/3⌉. And the estimates for the next call, unchanged where the sum is not finite.

    Source: Ok-Topk, Algorithm 1: boundaries averaged over the ranks, balancing where a block is
    above four times the mean. The k-th largest is found without gathering, and the cap is ours.
    """
    own, boundaries, threshold = selectable(stream), estimates.boundaries, estimates.threshold
    fits = boundaries is not None and (len(boundaries), boundaries[-1]) == (wire.size + 1, own.size)
    if renew_boundaries or boundaries is None or not fits:
        boundaries = average_boundaries(own, wire.comm)
    region = reduce_regions(own, boundaries, wire, max_nnz=max_nnz)
    if renew_threshold or threshold is None or estimates.k != k:
        winners = global_topk(region.values, wire.comm, k, own.size, region.finite)
        counts, threshold, finite = winners.counts, winners.threshold, winners.finite
    else:
        counts, finite = _count_from(threshold, region, wire)
        counts = _capped(counts, -(-4 * k // 3))
    if not finite:
        return void_like(own), estimates
    evened = wire.size * max(counts) > 4 * sum(counts)
    return gather_winners(region, counts, boundaries, wire, evened), Estimates(
        boundaries, threshold, k
    )


def _count_from(threshold: float, region: SparseStream, wire: Wire) -> tuple[list[int], bool]:
    """Count each rank's values from the threshold on, and tell whether all are finite."""
    selected, _ = kernels.threshold_select(region.values, threshold)
    finite = region.finite and all_finite(region.values)
    counts, finite = gather_numbers(torch.tensor([selected.numel()]), wire.comm, 1, finite)
    return torch.cat(counts).tolist(), finite


def _capped(counts: Sequence[int], cap: int) -> list[int]:
    """Lower counts in proportion, so that they sum to no more than ``cap``."""
    ends = list(accumulate(counts))
    total = ends[-1]
    if total <= cap:
        return list(counts)
    return [high - low for low, high in pairwise([0, *(end * cap // total for end in ends)])]
