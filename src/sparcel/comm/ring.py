"""The sum of dense vectors around a ring, where the engine has no sum of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from sparcel import patterns
from sparcel.ops import Op

Swap: TypeAlias = Callable[[int, Tensor, int, Tensor], None]
"""``swap(to, leaving, source, arriving)`` sends bytes (uint8) to a rank, and fills others with what
came from another rank. It raises `MismatchError` when that is longer or shorter."""


def reduce_around(tensor: Tensor, op: Op, rank: int, size: int, swap: Swap) -> None:
    """Reduce a contiguous tensor over all ranks in place: reduce-scatter, then all-gather.

    In step s of the first half, a rank sends region rank − s, to which the ranks before it have
    added theirs. In the second half the complete regions travel around. Sums run in an order that
    the world size fixes, so they have the same bits on all ranks and in every run.

    Parameters
    ----------
    op
        One of the built-in operations.
    """
    vector = tensor.detach().view(-1)
    regions = [vector[low:high] for low, high in pairwise(patterns.regions(len(vector), size))]
    # New memory takes longer to fill than to send, so there is little of it, and it is used again.
    scratch = torch.empty_like(max(regions, key=len))
    around = patterns.ring(rank, size)
    for step, (after, before, *_) in enumerate([*around, *around]):
        leaving, own = regions[(rank - step) % size], regions[(rank - step - 1) % size]
        adds = step < len(around)
        arriving = scratch[: len(own)] if adds else own
        swap(after, leaving.view(torch.uint8), before, arriving.view(torch.uint8))
        if adds:
            op.function(arriving, own, out=own)  # type: ignore[call-arg]  # it is one of torch
