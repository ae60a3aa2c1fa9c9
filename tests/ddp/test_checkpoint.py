"""Saving and resuming the same training, or with another number of ranks, loses nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.errors import InputError
from tests.ddp.models import LARGE, MANY_BUCKETS, SHAPES, Linear, known_gradient, residuals_of
from tests.evenly import attach_evenly
from tests.sampling import meeting

pytestmark = pytest.mark.processes

Residuals = dict[str, Tensor]


class Training:
    """A model with momentum; its gradients depend on its weights and are not integers.

    The optimiser is told to attach if ``method`` names one.
    """

    def __init__(self, comm: Communicator, method: dict[str, Any], **wrap: Any) -> None:
        method = dict(method)
        make = method.pop("optimizer", None)
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 40), nn.LayerNorm(40))
        self.rank = comm.rank
        self.ddp = DistributedDataParallel(layers, **wrap)
        self.optimizer = (make or BY_SGD)(self.ddp.parameters())
        if make is not None:
            method["optimizer"] = self.optimizer
        self.handle = attach_evenly(self.ddp, density=0.05, **method)
        self.first_lr = self.optimizer.param_groups[0]["lr"]

    def train(self, steps: range) -> None:
        for step in steps:
            data = torch.randn(
                8, 30, generator=torch.Generator().manual_seed(10 * step + self.rank)
            )
            for group in self.optimizer.param_groups:
                group["lr"] = self.first_lr / (1 + step)
            self.optimizer.zero_grad()
            (self.ddp(data) - data.sum()).square().mean().backward()
            self.optimizer.step()

    def make_room(self) -> None:
        """Create the optimizer's state, which dcp loads into."""
        for parameter in self.ddp.parameters():
            parameter.grad = torch.zeros_like(parameter)
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
        self.handle.close()
        return {name: weight.detach() for name, weight in self.ddp.module.named_parameters()}


def interrupt(
    comm: Communicator, folder: Path, method: dict[str, Any], kind: str, wrap: dict[str, Any]
) -> list[dict[str, Tensor]]:
    """Return the weights of an uninterrupted training, and of an interrupted one."""
    through = Training(comm, method, **wrap)
    through.train(range(6))
    first = Training(comm, method, **wrap)
    first.train(range(3))
    second = Training(comm, method, **wrap)
    second.make_room()
    if kind == "dcp":
        dcp.save(first.state(), checkpoint_id=folder)
        state = second.state()
        dcp.load(state, checkpoint_id=folder)
    else:
        torch.save(first.state(), folder / f"{comm.rank}.pt")
        state = torch.load(folder / f"{comm.rank}.pt")
    first.train(range(3, 5))  # must not change the saved state
    first.end()
    second.load(state)
    second.train(range(3, 6))
    assert second.handle.stats().training_steps == through.handle.stats().training_steps == 6
    return [through.end(), second.end()]


BY_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
BY_ADAMW = partial(torch.optim.AdamW, lr=0.01)

WRAPS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "rebuilt buckets": MANY_BUCKETS,
    "static graph": {**MANY_BUCKETS, "static_graph": True},
    "lasting buckets": {**MANY_BUCKETS, "find_unused_parameters": True},
}
METHODS: dict[str, dict[str, Any]] = {
    **{name: {"scheme_or_name": name} for name in ("topk", "gtopk", "sparcml", "oktopk")},
    "bidirectional": {"scheme_or_name": "bidirectional", "format": "packed:4"},
    "scalecom": {"scheme_or_name": "scalecom", "beta": 0.3},
    "hitopk": {"scheme_or_name": "hitopk", "ranks_per_node": 2},
    "whole model": {"scheme_or_name": "gtopk", "scope": "model"},
    "momentum": {"scheme_or_name": "gtopk", "momentum": 0.9, "clip": 2.0},
    "warm-up": {"scheme_or_name": "oktopk", "warmup": [0.5, 0.2], "warmup_steps": 2},
    "random": {"scheme_or_name": "topk", "selector": "randomk"},
    "known SGD": {"scheme_or_name": "topk", "optimizer": BY_SGD},
    "known AdamW": {"scheme_or_name": "topk", "optimizer": BY_ADAMW},
}


# Each method meets one way to wrap, and each way both kinds of checkpoint.
INTERRUPTED = [
    (name, ("dcp", "torch.save")[(number + number // 4) % 2], wrap)
    for number, (name, wrap) in enumerate(meeting(METHODS, WRAPS, each=1))
]


@pytest.mark.parametrize(("name", "kind", "wrap"), INTERRUPTED)
def test_interrupted_training_continues_bit_by_bit(
    run_on: Any, tmp_path: Path, name: str, kind: str, wrap: str
) -> None:
    for through, interrupted in run_on(2, interrupt, tmp_path, METHODS[name], kind, WRAPS[wrap]):
        assert through.keys() == interrupted.keys()
        for parameter in through:
            assert torch.equal(through[parameter], interrupted[parameter]), parameter


def owe(comm: Communicator, steps: int, folder: Path, gathered: bool = False) -> Residuals:
    """Save the state after some steps, and return it."""
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    handle = attach_evenly(ddp, "topk")
    for step in range(steps):
        ddp(comm.rank, step).backward()
        ddp.zero_grad()
    state = handle.state_dict()
    dcp.save({"sparcel": state}, checkpoint_id=folder / "dcp")
    torch.save(state, folder / f"{comm.rank}.pt")
    owed = residuals_of(handle, comm.rank)
    handle.close()
    return owed


def inherit(comm: Communicator, saved_by: int, folder: Path, kind: str) -> list[Residuals]:
    """Load the states of ``saved_by`` ranks; return the loaded state, and that after a step."""
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    handle = attach_evenly(ddp, "topk")
    if kind == "dcp":
        state = handle.state_dict(saved_by)
        dcp.load({"sparcel": state}, checkpoint_id=folder / "dcp")
    else:
        state = {}
        for rank in range(saved_by):
            state.update(torch.load(folder / f"{rank}.pt"))
    handle.load_state_dict(state)
    loaded = residuals_of(handle, comm.rank)
    ddp(comm.rank, 7).backward()
    after = residuals_of(handle, comm.rank)
    for name, parameter in ddp.module.named_parameters():
        if name in after:
            after[name] += parameter.grad.double().flatten()
    handle.close()
    return [loaded, after]


def total(ranks: list[Residuals], name: str) -> Tensor:
    return torch.stack([residuals[name] for residuals in ranks]).sum(0)


@pytest.mark.parametrize(("move", "kind"), [((2, 4), "dcp"), ((3, 2), "gathered")])
def test_another_world_size_inherits_all_that_is_owed(
    run_on: Any, tmp_path: Path, move: tuple[int, int], kind: str
) -> None:
    old, new = move
    owed = run_on(old, owe, 3, tmp_path)
    loaded, after = zip(*run_on(new, inherit, old, tmp_path, kind), strict=True)
    for name in LARGE:
        assert any(residuals[name].any() for residuals in owed)
        for rank in range(new):
            parts = [owed[r][name] for r in range(rank, old, new)]
            expected = sum(parts) * new / old if parts else torch.zeros_like(owed[0][name])
            torch.testing.assert_close(loaded[rank][name], expected, rtol=1e-6, atol=0)
        parameter = torch.zeros(SHAPES[name])
        gradients = [known_gradient(name, parameter, r, 7).double() for r in range(new)]
        # `after` includes the update, on every rank.
        expected = total(owed, name) * new / old + torch.stack(gradients).sum(0).flatten()
        torch.testing.assert_close(total(list(after), name), expected, rtol=0, atol=1e-4)


def test_saved_before_the_first_step(run_on: Any, tmp_path: Path) -> None:
    run_on(2, owe, 0, tmp_path)
    for loaded, after in run_on(2, inherit, 2, tmp_path, "dcp"):
        assert not any(owed.any() for owed in loaded.values())
        assert any(owed.any() for owed in after.values())


def load_wrong(comm: Communicator) -> dict[str, str]:
    """Return the error of each bad state; none of them changes anything."""
    ddp = DistributedDataParallel(Linear())
    handle = attach_evenly(ddp, "topk")
    ddp(comm.rank, 0).backward()
    good, other = handle.state_dict(), 1 - comm.rank
    first = f"rank{comm.rank}.first"
    foreign = {key.replace(f"rank{comm.rank}", f"rank{other}"): good[key] for key in good}
    bad = {
        "nothing": {},
        "a model's state": ddp.module.state_dict() | {"steps": 1, "world_size": 2},
        "an unknown parameter": {**good, f"rank{comm.rank}.fourth": good[first]},
        "a small parameter": {**good, f"rank{comm.rank}.bias": torch.zeros(40)},
        "another size": {**good, first: good[first][1:]},
        "another rank's": foreign,
    }
    before, said = residuals_of(handle, comm.rank), {}
    for name, state in bad.items():
        with pytest.raises(InputError) as raised:
            handle.load_state_dict(state)
        said[name] = str(raised.value)
    after = residuals_of(handle, comm.rank)
    assert all(torch.equal(before[name], after[name]) for name in before)
    handle.close()
    return said


def test_bad_entries_are_named(run_on: Any) -> None:
    for rank, said in enumerate(run_on(2, load_wrong)):
        assert "no 'steps'" in said["nothing"]
        assert "'first' is no entry" in said["a model's state"]
        assert f"'rank{rank}.fourth' fits no tensor" in said["an unknown parameter"]
        assert f"'rank{rank}.bias' fits no tensor" in said["a small parameter"]
        assert f"'rank{rank}.first' has 2559 elements, the parameter 2560" in said["another size"]
        assert f"holds nothing of the old ranks [{rank}]" in said["another rank's"]


def save_and_step(comm: Communicator) -> bool:
    ddp = DistributedDataParallel(Linear())
    handle = attach_evenly(ddp, "topk")
    for step in range(5):
        if step == 2:  # buckets are final, and their memory is no longer moved
            saved = handle.state_dict()
            copies = {key: value.clone() for key, value in saved.items()}
        ddp(comm.rank, step).backward()
    handle.close()
    return all(torch.equal(saved[key], copies[key]) for key in saved)


def test_a_saved_state_does_not_change_with_training(run_on: Any) -> None:
    assert run_on(2, save_and_step) == [True, True]


def dense_state(comm: Communicator) -> list[str]:
    handle = attach_evenly(DistributedDataParallel(Linear()), "dense")
    state = handle.state_dict()
    handle.load_state_dict(state)
    handle.close()
    return sorted(state)


def test_a_dense_scheme_has_nothing_to_save(run_on: Any) -> None:
    assert run_on(2, partial(dense_state)) == [["flush", "steps", "world_size"]] * 2
