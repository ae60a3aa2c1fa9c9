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
