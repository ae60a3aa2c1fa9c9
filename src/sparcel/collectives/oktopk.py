"""The global top-k of the ranks' streams at a volume that does not grow with the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import all_finite
from sparcel.collectives._blocks import (
    direct_bytes,
    evened_bytes,
    gather_direct,
    gather_evened,
    placed,
)
from sparcel.collectives._counts import counting_bytes, gather_numbers
from sparcel.collectives._global_topk import global_topk
from sparcel.collectives._regions import average_boundaries, balanced_boundaries, counters_for
from sparcel.collectives._transfer import stream_bytes
from sparcel.collectives.gtopk import gathered_topk
from sparcel.collectives.reduce_scatter import reduce_regions
from sparcel.comm import Communicator
from sparcel.errors import InputError
from sparcel.formats.header import HEADER_BYTES
from sparcel.stream import SparseStream


def oktopk(
    stream: SparseStream, comm: Communicator, k: int, max_nnz: int | None = None
) -> SparseStream:
    """Sum over all ranks and keep the k largest magnitudes, exactly.

    Parameters
    ----------
    stream
        Scalar float values: what this rank selected, at most ``max_nnz`` entries.
    k
        How many to keep: min(k, nonzeros of the sum); ties go to the lowest index. The same on
        all ranks, as is ``max_nnz``.

    Returns
    -------
    SparseStream
        Sparse, the same on all ranks; empty and not ``finite`` where an input or a sum was not.

    Where gathering every stream takes no more bytes, as between two ranks or for little data,
    `gathered_topk` does it, in fewer rounds and with the same bits; elsewhere `topk_by_regions`.
    Source: Ok-Topk, Algorithm 1. Boundaries and threshold are exact, and renewed in every call.
    """
    own = _sparse(stream)
    if _gathering_is_cheaper(own, comm.size, k, max_nnz):
        return gathered_topk(own, comm, k, max_nnz)
    return topk_by_regions(own, comm, k, max_nnz)


def topk_by_regions(
    own: SparseStream, comm: Communicator, k: int, max_nnz: int | None = None
) -> SparseStream:
    """Sum over all ranks and keep the k largest, as `oktopk`; ``own`` is sparse.

    Rounds: P−1 for the split, at most P−1 for the balancing, ⌈log₂P⌉ for each of two gathers, and
    some times ⌈log₂P⌉ for sums of counts. Words: at most 2k + 4k(P−1)/P, and the counts' few KB.
    """
    boundaries, finite = balanced_boundaries(own, comm, max_nnz)
    if not finite:
        return _void(own)
    region = reduce_regions(own, boundaries, comm, max_nnz=max_nnz)
    winners = global_topk(region.values, comm, k, own.size, region.finite)
    if not winners.finite:
        return _void(own)
    direct = direct_bytes(winners.counts, boundaries, own.dtype)
    # One more round, so it must be worth it.
    evened = 8 * evened_bytes(winners.counts, own) < 7 * direct
    return _gather(region, winners.counts, boundaries, comm, evened)


def _gathering_is_cheaper(like: SparseStream, ranks: int, k: int, max_nnz: int | None) -> bool:
    """Compare what all ranks know alike: all streams, and the least that regions take.

    The least is 4k(P−1)/P words where nothing is balanced, the headers, and a sum for boundaries.
    """
    entries = like.size if max_nnz is None else min(max_nnz, like.size)
    entry_bytes = like.dtype.itemsize + kernels.index_dtype(like.size).itemsize
    words = (entries + min(k, like.size)) * entry_bytes * (ranks - 1) // ranks
    headers = 3 * HEADER_BYTES * (ranks - 1)
    counts = counting_bytes(counters_for(ranks), ranks)
    return (ranks - 1) * stream_bytes(like, max_nnz) <= words + headers + counts


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
    comm: Communicator,
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
    own, boundaries, threshold = _sparse(stream), estimates.boundaries, estimates.threshold
    fits = boundaries is not None and (len(boundaries), boundaries[-1]) == (comm.size + 1, own.size)
    if renew_boundaries or boundaries is None or not fits:
        boundaries = average_boundaries(own, comm)
    region = reduce_regions(own, boundaries, comm, max_nnz=max_nnz)
    if renew_threshold or threshold is None or estimates.k != k:
        winners = global_topk(region.values, comm, k, own.size, region.finite)
        counts, threshold, finite = winners.counts, winners.threshold, winners.finite
    else:
        counts, finite = _count_from(threshold, region, comm)
        counts = _capped(counts, -(-4 * k // 3))
    if not finite:
        return _void(own), estimates
    evened = comm.size * int(counts.max()) > 4 * int(counts.sum())
    return _gather(region, counts, boundaries, comm, evened), Estimates(boundaries, threshold, k)


def _count_from(threshold: float, region: SparseStream, comm: Communicator) -> tuple[Tensor, bool]:
    """Count each rank's values from the threshold on, and tell whether all are finite."""
    selected, _ = kernels.threshold_select(region.values, threshold)
    finite = region.finite and all_finite(region.values)
    counts, finite = gather_numbers(torch.tensor([selected.numel()]), comm, 1, finite)
    return torch.cat(counts), finite


def _capped(counts: Tensor, cap: int) -> Tensor:
    """Lower counts in proportion, so that they sum to no more than ``cap``."""
    ends = counts.cumsum(0)
    if ends[-1] <= cap:
        return counts
    return (ends * cap // ends[-1]).diff(prepend=torch.tensor([0]))


def _gather(
    region: SparseStream,
    counts: Tensor,
    boundaries: list[int],
    comm: Communicator,
    evened: bool,
) -> SparseStream:
    """Give every rank the ``counts[rank]`` largest of every rank's region."""
    block = region.largest(int(counts[comm.rank]))
    if not evened:
        return gather_direct(block, counts, boundaries, comm)
    return gather_evened(placed(block, boundaries[comm.rank], boundaries[-1]), counts, comm)


def _sparse(stream: SparseStream) -> SparseStream:
    """Return the stream itself, or the nonzero coordinates of a dense one."""
    if stream.width is not None or not stream.dtype.is_floating_point:
        raise InputError(f"oktopk selects among scalar float values, got {stream}")
    return stream.largest(stream.size) if stream.is_dense else stream


def _void(like: SparseStream) -> SparseStream:
    """Return what stands for a sum that is not finite."""
    void = like.empty_like()
    void.finite = False
    return void
