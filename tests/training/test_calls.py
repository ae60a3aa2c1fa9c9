"""How many functions of Python a step calls, which is the time of a step of a small bucket."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch

from sparcel.core.comm import ALL_CONTROL, Communicator
from sparcel.core.schemes import Outcome, Scheme
from sparcel.core.schemes.step import Step
from sparcel.core.stream import SparseStream
from tests.evenly import even_averager

AT_MOST = 200
"""Of these, about 30 are the calls of `Least`."""


@dataclass(eq=False)
class Least(Scheme):
    """The least that a scheme can do: it sends a message to each rank."""

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("memory",)

    def reduce(self, step: Step) -> Outcome:
        gradient, comm, request, _, out = step
        assert out is gradient
        with request.costs.communicating():
            comm.gather(gradient[:2].view(torch.uint8), 8, ALL_CONTROL)
        total = SparseStream.unchecked(torch.tensor([3]), torch.ones(1), gradient.numel())
        gradient.zero_()
        return Outcome(total, True, 1, 1, (1.0,), gradient.numel(), 1)


def counted(comm: Communicator, run: Callable[[], object]) -> int:
    """Return how many functions this thread and that of the jobs call meanwhile."""
    numbers, counting = count(), False

    def note(frame: FrameType, event: str, _: Any) -> None:
        if counting and event == "call":
            next(numbers)

    sys.setprofile(note)
    comm.submit(lambda: sys.setprofile(note)).wait()
    gc.collect()
    gc.disable()  # it would call what others have left
    counting = True
    run()
    counting = False
    gc.enable()
    sys.setprofile(None)
    comm.submit(lambda: sys.setprofile(None)).wait()
    return next(numbers)


def calls_of_a_step(comm: Communicator, large: int, small: int) -> int:
    tensors = {f"{number}.weight": torch.zeros(40, 50) for number in range(large)}
    tensors |= {f"{number}.bias": torch.zeros(50) for number in range(small)}
    averager = even_averager(tensors, Least(), group=comm)
    ends = torch.tensor([tensor.numel() for tensor in tensors.values()]).cumsum(0).tolist()
    vector = torch.zeros(ends[-1])

    def step() -> None:
        places = zip([0, *ends], ends, strict=False)
        averager.queue(vector.fill_(1), dict(zip(tensors, places, strict=True)))
        averager.finish()

    step()
    step()
    return counted(comm, step)


@pytest.mark.processes
def test_a_step_takes_few_calls_however_many_tensors(run_on: Any) -> None:
    for rank in run_on(2, calls_of_a_step, 10, 6), run_on(2, calls_of_a_step, 40, 30):
        assert 100 < min(rank) <= max(rank) <= AT_MOST
