"""Checkpoints go from the GPU to the CPU and back, and training continues bit by bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from tests.ddp.models import MANY_BUCKETS
from tests.evenly import attach_evenly
from tests.gpu.cuda import GPU, needs_gpu
from tests.gpu.models import (
    METHODS,
    TOPK,
    Springs,
    assert_equal,
    on_cpu,
    parameters_of,
    targets_of,
)
from tests.sampling import meeting

pytestmark = [*needs_gpu, pytest.mark.processes]

CHECKPOINTED: dict[str, dict[str, Any]] = {
    **METHODS,
    "momentum": {**TOPK, "momentum": 0.5},
    "gtopk over the model": {"scheme_or_name": "gtopk", "density": 0.05, "scope": "model"},
    "scalecom": {"scheme_or_name": "scalecom", "density": 0.05, "beta": 0.5},
}
DTYPES = [torch.float32, torch.float64]


class Training:
    """A model, its optimiser, and what sparcel remembers of it."""

    def __init__(
        self, comm: Communicator, place: torch.device | str, method: dict[str, Any], dtype: Any
    ) -> None:
        self.rank = comm.rank
        self.ddp = DistributedDataParallel(Springs(dtype).to(place), **MANY_BUCKETS)
        momentum = 0.0 if "momentum" in method else 0.5
        # Products with powers of two are exact, so no device rounds otherwise.
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.125, momentum=momentum)
        self.handle = attach_evenly(self.ddp, optimizer=self.optimizer, **method)

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.ddp(targets_of(self.ddp.module, self.rank, step)).backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sparcel": self.handle.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.ddp.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load_state_dict(state["sparcel"])

    def end(self) -> dict[str, Tensor]:
        """Return the parameters and the memory at the end, on the CPU."""
        memory = {key: one for key, one in self.handle.state_dict().items() if "layout" not in key}
        self.handle.close()
        return {**parameters_of(self.ddp), **on_cpu(memory)}


def there_and_back(
    comm: Communicator, method: dict[str, Any], dtype: torch.dtype, folder: Path
) -> dict[str, Tensor]:
    """Move a training of the GPU to the CPU in a file, and back in another one."""
    make = partial(Training, comm, method=method, dtype=dtype)
    through = make(place=GPU)
    through.train(range(6))
    first = make(place=GPU)
    first.train(range(3))
    torch.save(first.state(), folder / f"gpu{comm.rank}.pt")
    between = make(place="cpu")
    # The tensors of a checkpoint may be on any device; with the default they are on the GPU.
    places = [None, "cpu"]
    between.load(torch.load(folder / f"gpu{comm.rank}.pt", map_location=places[comm.rank]))
    assert_equal(on_cpu(between.handle.state_dict()), on_cpu(first.handle.state_dict()))
    torch.save(between.state(), folder / f"cpu{comm.rank}.pt")
    last = make(place=GPU)
    last.load(torch.load(folder / f"cpu{comm.rank}.pt"))
    assert all(one.device.type == GPU.type for one in memory_of(last))
    last.train(range(3, 6))
    between.end()
    first.end()
    found = last.end()
    assert_equal(found, through.end())
    return parameters_of(last.ddp)


def memory_of(training: Training) -> list[Tensor]:
    state = training.handle.state_dict()
    return [one for key, one in state.items() if key.startswith(("rank", "velocity"))]


@pytest.mark.parametrize(("name", "dtype"), meeting(CHECKPOINTED, DTYPES, each=1))
def test_a_training_that_went_by_way_of_the_cpu_continues_bit_by_bit(
    run_on: Any, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    first, second = run_on(2, there_and_back, CHECKPOINTED[name], dtype, tmp_path)
    assert_equal(first, second)


def moved_for_good(comm: Communicator, folder: Path) -> None:
    """Go on with the CPU's training on the GPU, and with the GPU's on the CPU, by dcp."""
    for start, end in ((GPU, "cpu"), ("cpu", GPU)):
        make = partial(Training, comm, method={**TOPK, "ahead": False}, dtype=torch.float32)
        first, second, through = make(place=start), make(place=end), make(place=end)
        first.train(range(3))
        dcp.save(first.state(), checkpoint_id=folder / str(start))
        second.train(range(1))  # makes the optimiser's state, which dcp loads into
        state = second.state()
        dcp.load(state, checkpoint_id=folder / str(start))
        second.load(state)
        second.train(range(3, 6))
        through.train(range(6))
        first.end()
        assert_equal(second.end(), through.end())


def test_a_training_that_moved_ends_where_one_that_stayed_does(run_on: Any, tmp_path: Path) -> None:
    """Without step-ahead, whose rate is no power of two, each device has the same bits."""
    run_on(2, moved_for_good, tmp_path)


def gathered(comm: Communicator) -> None:
    """Give all ranks' state on one rank, on the CPU, to trainings on both devices."""
    first = Training(comm, GPU, TOPK, torch.float32)
    first.train(range(3))
    whole = [first.handle.full_state_dict()]
    assert all(one.device.type == "cpu" for one in whole[0].values())
    torch.distributed.broadcast_object_list(whole)
    expected = on_cpu(first.handle.state_dict())
    first.end()
    for place in (GPU, "cpu"):
        other = Training(comm, place, TOPK, torch.float32)
        other.handle.load_state_dict(whole[0])
        assert_equal(on_cpu(other.handle.state_dict()), expected)
        other.end()


def test_the_state_of_all_ranks_is_on_the_cpu_and_loads_anywhere(run_on: Any) -> None:
    run_on(2, gathered)
