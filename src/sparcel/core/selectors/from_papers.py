"""Selectors that only reproduce a paper. `ExactTopK` takes less time, or trains better."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparcel.core import device, kernels
from sparcel.core._checks import checked_number, checked_whole
from sparcel.core.selectors.base import Ranked, Selector, distinct, integers, reaching, stream_of
from sparcel.core.stream import SparseStream


@dataclass(eq=False)
class Bucketed(Ranked):
    """The same number of the largest of every ``bucket`` consecutive coordinates.

    Each bucket gives max(1, round(bucket·k/size)) coordinates, or all its nonzeros if it has fewer.
    A vector no longer than a bucket gives min(k, nnz). In a longer vector the total differs from k
    by up to half a coordinate a bucket, because of the rounding; by more if k is below the number
    of buckets, because every bucket gives one. A short last bucket gives as many as a full one.

    Parameters
    ----------
    bucket
        Length of a bucket.
    count
        How many to select of each bucket, whatever k is. None: the rule above.

    Source: SparCML, section 8.3.
    """

    bucket: int = 512
    count: int | None = None

    def __post_init__(self) -> None:
        self.bucket = checked_whole(self.bucket, "bucket", at_least=1)
        if self.count is not None:
            self.count = checked_whole(self.count, "count", at_least=1)

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Round the density to a count a bucket."""
        if self.count is not None:
            return self.count, self.bucket
        density = min(k, size) / max(size, 1)
        return max(1, round(min(self.bucket, size) * density)), self.bucket


@dataclass(eq=False)
class Chunkwise(Ranked):
    """The ``m`` largest of each of about k/m chunks of equal length.

    Chunks have ⌈size/⌊k/m⌋⌉ coordinates, so never more than k are selected. Fewer are selected
    because lengths are whole numbers (by a share of at most density/m: 1 % if k is 1 % of the
    coordinates and m is 1), and because k need not be a multiple of m and the last chunk is short
    (by up to 2·(m−1)). A chunk with fewer than m nonzeros gives fewer.

    Parameters
    ----------
    m
        How many to select of each chunk; if k is less, k of the whole vector.

    Source: ScaleCom, its chunk-wise quasi-sort.
    """

    m: int = 1

    def __post_init__(self) -> None:
        self.m = checked_whole(self.m, "m", at_least=1)

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Choose the shortest chunks that let no more than k through."""
        k = max(1, min(k, size))
        count = min(self.m, k)
        return count, max(1, -(-size // (k // count)))


_TOGETHER = 10
"""How many samplings a pass over the vector decides, by counting all that they may ask for."""
_PARTS = 16
"""A vector is read in so many parts if more than one of them would be listed at once."""
_SHORTEST = 2**15
"""The fewest entries of a part."""


@dataclass(eq=False)
class MSTopK(Selector):
    """Exactly min(k, nnz) coordinates, by a threshold that is found by counting.

    The threshold is bisected between the mean and the largest magnitude. This leaves two: the
    highest that more than k magnitudes reach, or 0; and the lowest that k or fewer reach. All
    coordinates that reach the latter are selected. The rest of the k are taken from those between
    the two: consecutive ones, beginning at a random place.

    Each sampling halves the distance of the two, to d = (max − mean) / 2**samplings at last. If
    more than k magnitudes reach mean + d, all coordinates in which the selection differs from the
    exact one lie within d of the (k+1)-th largest magnitude, or the rounding of the dtype if that
    is coarser. If not, no sampling has more than k: all that reach mean + d are selected, and the
    rest of the k are any coordinates below, whatever their magnitude.

    Parameters
    ----------
    samplings
        How often to halve; the paper's N.
    seed
        Decides, with the step, where the random slice begins.

    Source: CommLib, Algorithm 1. Ten samplings take one pass over the vector, which counts all
    1,023 thresholds that they may ask for. Deviations: if no sampling lets k or fewer through, all
    k come from the slice; the published threshold is then 0 and selects everything. Zeros are never
    selected.
    """

    samplings: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        self.samplings = checked_whole(self.samplings, "samplings", at_least=1)
        self.seed = checked_whole(self.seed, "seed")

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Bisect the threshold, and fill up from the slice."""
        if x.numel() == 0:
            return stream_of(*kernels.threshold_select(x, 0), x)
        names, values, found = self._bisect(x, k)
        left, low, high, reached, above = device.read(found).tolist()
        if left == 0:  # no sampling had more than k
            names, values, low, reached = None, x, 0.0, int(device.read(torch.count_nonzero(x)))
        between = int(reached - above)
        needed = max(0, min(k - int(above), between))  # above k only in a vector with NaN
        start = int(integers(1, between - needed + 1, self.seed, step))
        few = names is not None or _PARTS * reached <= x.numel()
        parts, passed = [], torch.zeros((), dtype=torch.int64, device=x.device)
        for places, some in _all_reaching(values, low, 1 if few else _PARTS):
            surely = some.abs() >= high
            number = torch.cumsum(~surely, 0) + (passed - 1)  # of those between, from 0
            passed = passed + (~surely).sum()
            kept = surely | ((number >= start) & (number < start + needed))
            parts.append(reaching(places, torch.where(kept, some, 0), 0))
        chosen, taken = (torch.cat(part) for part in zip(*parts, strict=True))
        return stream_of(chosen if names is None else names.index_select(0, chosen), taken, x)

    def _bisect(self, x: Tensor, k: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return what the samplings found, and the entries of ``x`` that may reach it.

        That is float64 ``[5]``, on the device: the left end of the interval of ratios, from 0 to 1;
        the thresholds at its ends; and how many reach these. Before it come the entries' indices,
        None if they are all of ``x``, and their values.
        """
        mean, peak = kernels.magnitude_ends(x).unbind()
        names, values = None, x
        left, width, high = mean.new_zeros(1), 1.0, x.new_full((1,), math.inf)
        for done in range(0, self.samplings, _TOGETHER):
            ways = 2 ** min(_TOGETHER, self.samplings - done)
            width /= ways
            ratios = left + width * torch.arange(ways, dtype=torch.float64, device=x.device)
            thresholds = torch.cat([(mean + ratios * (peak - mean)).to(x.dtype), high])
            place, *counts = kernels.bracket(values, thresholds, k).split(1)
            left, low = ratios.index_select(0, place), thresholds.index_select(0, place)
            high = thresholds.index_select(0, place + 1)
            # The host reads its own memory at once. A GPU would have to wait for the host.
            on_host = x.device.type not in device.GPUS
            if names is None and on_host and _PARTS * int(counts[0]) <= x.numel():
                names, values = kernels.threshold_select(x, float(low))
        return names, values, torch.cat([part.double() for part in (left, low, high, *counts)])


def _all_reaching(x: Tensor, threshold: float, parts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices and values of the magnitudes of at least ``threshold``, in order.

    In several parts, what is allocated is smaller than ``x``, however many there are.
    """
    start = 0
    for part in x.split(max(_SHORTEST, -(-x.numel() // parts))):
        positions, values = kernels.threshold_select(part, threshold)
        yield positions.to(kernels.index_dtype(x.numel())) + start, values
        start += part.numel()


@dataclass(eq=False)
class ThresholdReuse(Selector):
    """Exactly min(k, nnz) coordinates in steps that renew the threshold, else all that reach it.

    In a step that renews the threshold, the selection is exact, and its smallest magnitude becomes
    the threshold. In other steps all coordinates that reach the threshold are selected, at most the
    ⌈4k/3⌉ largest, ties to the lowest index. If magnitudes change slowly the count stays near k;
    Ok-Topk saw it deviate by less than 11 % on average.

    Parameters
    ----------
    period
        The threshold is renewed in steps 0, period, 2·period …, or in the next step that the
        selector serves. It is also renewed if there is none yet and if k changes.

    Source: Ok-Topk, section 3.1.3. Deviations: the cap; renewal if k changes.
    """

    period: int = 32
    _threshold: float | None = field(default=None, init=False, repr=False)
    _k: int = field(default=0, init=False, repr=False)
    _since: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.period = checked_whole(self.period, "period", at_least=1)

    def most(self, k: int, size: int) -> int:
        """Return ⌈4k/3⌉, or the size."""
        return min(-(-4 * k // 3), size)

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Renew the threshold or reuse it."""
        threshold = self._threshold
        # A step that renewed and did not commit is repeated, and then renews again.
        same_period = step // self.period == self._since // self.period
        reusable = self._k == k and self._since < step and same_period
        if threshold is not None and reusable:
            indices, values = kernels.topk(x, self.most(k, x.numel()))
            return stream_of(*reaching(indices, values, threshold), x)
        indices, values = kernels.topk(x, k)
        self._threshold = float(device.read(values.abs().min())) if values.numel() else None
        self._k, self._since = k, step
        return stream_of(indices, values, x)

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold, with the k and the step that it was computed for."""
        return {"threshold": self._threshold, "k": self._k, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the threshold, with the k and the step that it was computed for."""
        hint, threshold = "load what such a selector saved", state.get("threshold")
        if threshold is not None:
            threshold = checked_number(
                threshold, "threshold", at_least=0, below=math.inf, hint=hint
            )
        k = checked_whole(state.get("k"), "k", at_least=0, hint=hint)
        since = checked_whole(state.get("since"), "since", at_least=0, hint=hint)
        self._threshold, self._k, self._since = threshold, k, since


@dataclass(eq=False)
class RandomK(Selector):
    """The nonzeros among min(k, size) coordinates that are drawn without replacement.

    All coordinates are equally likely, whatever their values. Ranks with the same seed draw the
    same coordinates in the same step. Time and memory grow with k, not with the size.

    Parameters
    ----------
    seed
        Decides, with the step, which coordinates are drawn.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        self.seed = checked_whole(self.seed, "seed")

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Draw coordinates, and leave out those that are zero."""
        size = x.numel()
        drawn = distinct(min(k, size), size, self.seed, step)
        places = device.put(drawn, x.device, kernels.index_dtype(size))
        return stream_of(*reaching(places, x.index_select(0, places), 0), x)
