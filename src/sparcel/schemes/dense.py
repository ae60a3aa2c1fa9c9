"""The baseline: the whole vector, summed by the engine, at full or at half precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel._checks import all_finite
from sparcel.collectives.dense import check_agreement
from sparcel.comm import Communicator
from sparcel.errors import known
from sparcel.schemes.base import Scheme, update_like
from sparcel.stream import SparseStream

_WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(eq=False)
class Dense(Scheme):
    """The average of the gradients; nothing is kept back.

    Parameters
    ----------
    wire
        ``"bfloat16"``, ``"float16"`` or ``"float32"``: what travels, and what the engine adds in;
        None for the gradient's own dtype.
    """

    wire: str | None = None

    def __post_init__(self) -> None:
        if self.wire is not None:
            known(self.wire, _WIRES, "wire")

    def begin(self, gradient: Tensor, comm: Communicator, out: Tensor | None = None) -> Tensor:
        """See `Scheme.begin`."""
        update = update_like(gradient, out)
        average = self._average(gradient, comm, update)
        self.finite = all_finite(average)
        self.cost.reduced += gradient.numel()
        self.cost.coordinates += gradient.numel()
        return update.copy_(average) if self.finite else update.fill_(float("nan"))

    def reduce(
        self, gradient: Tensor, comm: Communicator, ranks: int | None = None
    ) -> tuple[SparseStream, int]:
        """See `Scheme.reduce`."""
        scratch = torch.empty_like(gradient)
        average = self._average(gradient, comm, scratch, ranks).to(gradient.dtype)
        finite = all_finite(average)
        return SparseStream.unchecked(None, average, average.numel(), finite), 1

    def _average(
        self, gradient: Tensor, comm: Communicator, into: Tensor, ranks: int | None = None
    ) -> Tensor:
        with self.cost.communicating():
            # An average cannot overflow a half-precision wire where a sum could.
            average = torch.div(gradient, ranks or comm.size, out=into)
            if self.wire is not None:
                average = average.to(_WIRES[self.wire])
            comm.all_reduce(average)
        self.cost.asked += gradient.numel()
        self.cost.selected += gradient.numel()
        return average

    def _agree(self, gradient: Tensor, comm: Communicator) -> None:
        check_agreement(SparseStream.unchecked(None, gradient, gradient.numel()), comm)
