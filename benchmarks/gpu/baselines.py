"""Other selections by magnitude for `measure.py`, in torch as they were published.

`paper_selectors` shows what such rules select. These functions show what they take.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

Select = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""``(x, k) -> indices, values``, in any order."""


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select as one would without sparcel."""
    indices = torch.topk(x.abs(), k).indices
    return indices, x[indices]


def topk_unsorted(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select without asking for an order."""
    indices = torch.topk(x.abs(), k, sorted=False).indices
    return indices, x[indices]


def mstopk(x: Tensor, k: int, samplings: int = 30) -> tuple[Tensor, Tensor]:
    """Select as CommLib's Algorithm 1 does; the host reads the count of each sampling."""
    magnitudes = x.abs()
    mean, peak = float(magnitudes.mean()), float(magnitudes.max())
    left, right = 0.0, 1.0
    fewer, more = 0, x.numel()
    upper, lower = 0.0, 0.0
    for _ in range(samplings):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (peak - mean)
        count = int(torch.count_nonzero(magnitudes >= threshold))
        if count <= k:
            right = ratio
            if count > fewer:
                fewer, upper = count, threshold
        else:
            left = ratio
            if count < more:
                more, lower = count, threshold
    surely = (magnitudes >= upper).nonzero().view(-1)
    between = ((magnitudes < upper) & (magnitudes >= lower)).nonzero().view(-1)
    needed = k - fewer
    start = random.randrange(between.numel() - needed + 1)
    indices = torch.cat([surely, between[start : start + needed]])
    return indices, x[indices]


def double_sampling(x: Tensor, k: int, share: float = 0.01) -> tuple[Tensor, Tensor]:
    """Select as DGC's published code does: by a sample's threshold, which is adapted.

    From 0.8·k to k entries, those of a second top-k if more than 1.3·k pass; the first k by index
    if fewer do. After ten adaptations, whatever passes.
    """
    size, magnitudes = x.numel(), x.abs()
    count = min(size, max(math.ceil(share * size), math.ceil(size / k)))
    sample = magnitudes[torch.randint(size, (count,), device=x.device)]
    rank = min(count, math.ceil(count * k / size))
    threshold = torch.topk(sample, rank, sorted=False).values.min()
    indices = (magnitudes >= threshold).nonzero().view(-1)
    for _ in range(10):
        passed = indices.numel()
        if passed > 1.3 * k:
            indices = indices[torch.topk(magnitudes[indices], k, sorted=False).indices]
            break
        if passed >= 0.8 * k:
            break
        threshold = threshold * 0.8
        indices = (magnitudes >= threshold).nonzero().view(-1)
    indices = indices[:k]
    return indices, x[indices]


def flashinfer_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select by FlashInfer's radix top-k."""
    import flashinfer

    _, indices = flashinfer.top_k(x.abs().view(1, -1), k)
    indices = indices.view(-1).long()
    return indices, x[indices]


EXACT: dict[str, Select] = {
    "torch.topk of |x|": topk,
    "torch.topk, sorted=False": topk_unsorted,
}
if find_spec("flashinfer") is not None:
    EXACT["flashinfer.top_k of |x|"] = flashinfer_topk

APPROXIMATE: dict[str, Select] = {
    "MSTopK, 30 samplings": mstopk,
    "DGC's double sampling": double_sampling,
}
