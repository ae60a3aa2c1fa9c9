"""The passes of the two exchanges by regions: those that select, and those of all coordinates.

Messages are rows of one tensor. Other formats than few bits, and momentum, are left to the
definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparcel.kernels.definitions import regions
from sparcel.kernels.definitions.regions import Collected, Delivered, Entered
from sparcel.kernels.definitions.select import Addition
from sparcel.kernels.gpu import _arrived, _selected, _whole
from sparcel.kernels.phase import Phase


def enter(addition: Addition, up: Phase, rank: int, step: int) -> Entered:
    wide = addition.gradient.dtype == torch.float64
    if not up.group or wide or addition.entering is not None or addition.clear:
        return regions.enter(addition, up, rank, step)
    if up.dense:
        return Entered(*_whole.enter(addition, up, rank))
    return Entered(*_selected.enter(addition, up, rank, step))


def collect(
    addition: Addition,
    arrived: Sequence[Tensor] | Tensor,
    up: Phase,
    down: Phase,
    rank: int,
    step: int,
) -> Collected:
    if not (up.group and down.group) or addition.entering is not None:
        return regions.collect(addition, arrived, up, down, rank, step)
    x, rows = addition.scratch, _rows(arrived)
    if up.dense and down.dense:
        return Collected(*_whole.collect(x, rows, up, down, rank))
    added = (_whole if up.dense else _arrived).add(x, rows, up, rank)
    if down.dense:
        made = _whole.take_own(x, down, rank, added.finite, added.magnitude)
    else:
        made = _selected.take_own(x, down, rank, step, added.finite, added.magnitude)
    return Collected(*made, added.fault)


def deliver(
    out: Tensor, returned: Sequence[Tensor] | Tensor, down: Phase, divisor: float
) -> Delivered:
    if not down.group or out.dtype == torch.float64:
        return regions.deliver(out, returned, down, divisor)
    passes = _whole if down.dense else _arrived
    return Delivered(*passes.deliver(_rows(returned), down, divisor, out))


def _rows(messages: Sequence[Tensor] | Tensor) -> Tensor:
    """Return messages in one tensor, as they come where the ranks are on GPUs."""
    return messages if isinstance(messages, Tensor) else torch.stack([*messages])
