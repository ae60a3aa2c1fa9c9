"""Steps of an optimiser on the CPU: one pass over all tensors that lie in memory as they move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented

from sparcel import _cpu
from sparcel.kernels.definitions import ahead


def moved(tensors: Sequence[Tensor], moves: Sequence[ahead.Along | ahead.AsAdam]) -> list[Tensor]:
    jobs = [_job(one, move) for one, move in zip(tensors, moves, strict=True)]
    given = [job.given for job in jobs if job is not None]
    made = iter(_cpu.moved(given, torch.get_num_threads()))
    return [
        ahead.moved([one], [move])[0] if job is None else job.arranged(next(made))
        for job, one, move in zip(jobs, tensors, moves, strict=True)
    ]


class _Job(NamedTuple):
    """A tensor to move: what the pass takes, and how its dimensions lie in memory."""

    given: tuple[Any, ...]
    shape: torch.Size
    order: list[int] | None

    def arranged(self, flat: Tensor) -> Tensor:
        """Return the result of the pass in the shape and the order of the tensor."""
        values = flat.view(self.shape)
        if self.order is None:
            return values
        return values.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


def _job(tensor: Tensor, move: ahead.Along | ahead.AsAdam) -> _Job | None:
    """Return what the pass takes, None unless all are of float32 and fill memory in one order."""
    scale = None if isinstance(move, ahead.Along) else move.scale
    parts = [tensor, move.direction if isinstance(move, ahead.Along) else move.gradient]
    if scale is not None:
        parts += [scale.squares] if scale.largest is None else [scale.squares, scale.largest]
    if any(one.dtype != torch.float32 or type(one) not in (Tensor, nn.Parameter) for one in parts):
        return None
    parts, order = [one.detach() if one.requires_grad else one for one in parts], None
    if not all(one.is_contiguous() for one in parts):
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        parts = [one.permute(order) for one in parts]
        if not all(one.is_contiguous() for one in parts):
            return None
    values, direction, *squares = map(to_dlpack, parts)
    scaled = None
    if scale is not None:
        largest = squares[1] if scale.largest is not None else None
        scaled = squares[0], largest, scale.beta, 1 - scale.beta, 1 / scale.bias, scale.eps
    return _Job((values, direction, move.rate, scaled), parts[0].shape, order)
