"""The baseline: the whole vector, summed by the engine, at full or at half precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from sparcel.core import kernels
from sparcel.core.collectives.all_reduce import check_agreement
from sparcel.core.comm import Communicator
from sparcel.core.device import finite_flag
from sparcel.core.schemes.base import Scheme
from sparcel.core.schemes.step import Outcome, Step
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.errors import checked_name

_WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def wired_dtype(wire: str | None, own: torch.dtype) -> torch.dtype:
    """Return the dtype that ``wire`` names, or ``own`` for None; `InputError` for another name."""
    return own if wire is None else _WIRES[checked_name(wire, _WIRES, "wire")]


@dataclass(eq=False)
class Dense(Scheme):
    """The average of the gradients; nothing is kept back.

    Parameters
    ----------
    wire
        ``"bfloat16"``, ``"float16"`` or ``"float32"``: the dtype in which values travel and are
        added; None for the gradient's own dtype.
    """

    wire: str | None = None

    def __post_init__(self) -> None:
        wired_dtype(self.wire, torch.float32)

    @override
    def reduce(self, step: Step) -> Outcome:
        gradient, comm, size = step.gradient, step.comm, step.gradient.numel()
        with step.request.costs.communicating():
            # An average cannot overflow half precision, but a sum could.
            average = kernels.average(gradient, step.plan.ranks, step.out)
            wired = average.to(wired_dtype(self.wire, average.dtype))
            comm.all_reduce(wired)
            average.copy_(wired)
        finite = finite_flag(average)
        stream = SparseStream.unchecked(None, average, size, finite)
        return Outcome(stream, finite, size, size, (), size, size, sent_whole=True)

    def _agree(self, gradient: Tensor, comm: Communicator) -> None:
        check_agreement(SparseStream.unchecked(None, gradient, gradient.numel()), Wire(comm))
