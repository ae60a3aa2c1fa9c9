"""MSTopK: bisects the threshold, then fills up from a random slice of the undecided magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel import device, kernels
from sparcel._checks import checked_whole
from sparcel.selectors.base import Selector, reaching, stream_of
from sparcel.selectors.draws import integers
from sparcel.stream import SparseStream

_SPARE = 64
"""How many magnitudes beyond the k + 1 largest are looked up at first."""
_BLOCK = 2**15
"""Coordinates in a block; torch sums this many in the same order on every machine."""


@dataclass(eq=False)
class MSTopK(Selector):
    """Exactly min(k, nnz) coordinates, nearly those of largest magnitude.

    The threshold is bisected between the mean and the largest magnitude. This leaves two
    thresholds: the lowest that lets k or fewer through, and the highest that lets more through. All
    coordinates above the former are selected. The rest of the k are taken from those between the
    two: consecutive ones, beginning at a random place. Each sampling halves the distance of the
    thresholds, so only coordinates within ``(max − mean) / 2**samplings`` of the k-th magnitude can
    differ from the exact top-k.

    Parameters
    ----------
    samplings
        How often to halve; the paper's N.
    seed
        Decides, with the step, where the random slice begins.

    Source: CommLib, Algorithm 1. Deviations: if no sampling lets k or fewer through, all k come
    from the slice; the published threshold is then 0 and selects everything. Zeros are never
    selected. A sampling compares its threshold with the (k+1)-th largest magnitude instead of
    counting in the vector, which gives the same answer.
    """

    samplings: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        self.samplings = checked_whole(self.samplings, "samplings", at_least=1)
        self.seed = checked_whole(self.seed, "seed")

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Bisect the threshold, and fill up from the slice."""
        indices, values = kernels.topk(x, k + 1 + _SPARE)
        if values.numel() == 0:
            return stream_of(indices, values, x)
        low, high, least = self._thresholds(x, k, values)

        def candidates() -> Iterator[tuple[Tensor, Tensor]]:
            """Yield all that reach the lower threshold, in order."""
            if values.numel() <= k + _SPARE or least < low:
                yield reaching(indices, values, low)
            else:
                yield from _all_reaching(x, low)

        above = int(device.read((values.abs() >= high).sum()))
        between = sum(found.numel() for _, found in candidates()) - above
        needed = min(k - above, between)
        start = int(integers(1, between - needed + 1, self.seed, step))
        parts, passed = [], torch.zeros((), dtype=torch.int64, device=x.device)
        for places, found in candidates():
            surely = found.abs() >= high
            number = torch.cumsum(~surely, 0) + (passed - 1)  # of those between, from 0
            passed = passed + (~surely).sum()
            kept = surely | ((number >= start) & (number < start + needed))
            parts.append(reaching(places, torch.where(kept, found, 0), 0))
        chosen, taken = (torch.cat(part) for part in zip(*parts, strict=True))
        return stream_of(chosen, taken, x)

    def _thresholds(self, x: Tensor, k: int, largest: Tensor) -> tuple[float, float, float]:
        """Return the last threshold with more than k, else 0; the last with up to k, else inf.

        They are rounded to the dtype of ``x``. ``largest`` holds its k + 1 largest magnitudes, and
        maybe more, if there are so many. The third number is the least of them.
        """
        _, most = kernels.topk(largest, k + 1)
        ends = torch.stack([largest.abs().max(), most.abs().min(), largest.abs().min()])
        peak, next_largest, least = device.read(ends).tolist()
        if most.numel() <= k:
            next_largest = 0.0  # all that there are may pass
        mean = _mean_magnitude(x, peak)
        low, high, left, right = 0.0, math.inf, 0.0, 1.0
        for _ in range(self.samplings):
            ratio = left + (right - left) / 2
            threshold = rounded(mean + ratio * (peak - mean), x)
            if next_largest > 0 and next_largest >= threshold:
                left, low = ratio, threshold
            else:
                right, high = ratio, threshold
        return low, high, least


def rounded(threshold: float, x: Tensor) -> float:
    """Return a threshold as the dtype of ``x`` holds it."""
    return float(torch.tensor(threshold, dtype=x.dtype, device="cpu"))


def _all_reaching(x: Tensor, threshold: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices and values of the magnitudes of at least ``threshold``, part by part.

    What it allocates is smaller than ``x``, however many there are.
    """
    start = 0
    for part in x.split(_part_length(x)):
        positions, values = kernels.threshold_select(part, threshold)
        yield positions.to(kernels.index_dtype(x.numel())) + start, values
        start += part.numel()


def _mean_magnitude(x: Tensor, peak: float) -> float:
    """Return the mean magnitude of a vector; ``peak`` is its largest magnitude, above 0.

    Blocks are summed in float32 or wider, and the blocks' sums in float64.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    room, sums = torch.empty(_part_length(x), dtype=wide, device=x.device), []
    for part in x.split(_part_length(x)):
        # Sums of the magnitudes themselves might overflow.
        scaled = torch.div(part.to(wide), peak, out=room[: part.numel()]).abs_()
        whole = part.numel() // _BLOCK * _BLOCK
        blocks = scaled[:whole].view(-1, _BLOCK).sum(dim=1).double().sum()
        sums.append(blocks + scaled[whole:].sum().double())
    return math.fsum(device.read(torch.stack(sums)).tolist()) / x.numel() * peak


def _part_length(x: Tensor) -> int:
    """Return the length of the parts in which a vector is read; a long vector has about 64."""
    return max(_BLOCK, x.numel() // 64)
