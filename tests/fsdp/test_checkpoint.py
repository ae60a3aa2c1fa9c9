"""Memory in torch.distributed.checkpoint: on other meshes nothing is lost, on the same no bit."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import sparcel
from sparcel.core.comm import Communicator
from sparcel.errors import InputError
from tests.evenly import attach_evenly
from tests.fsdp.models import Stack, memory_of, mesh_of, shard, whole
from tests.fsdp.nets import Net, loss_of, sharded

pytestmark = pytest.mark.processes


def saved(comm: Communicator, replicas: int, folder: Path) -> dict[str, Tensor]:
    """Save a training of integers, and return what all replicas remember."""
    mesh = mesh_of(replicas, comm.size // replicas)
    model = shard(Stack(), mesh["shard"])
    handle = attach_evenly(model, "topk", density=0.02, replicate=mesh["replicate"])
    for step in range(2):
        model(comm.rank, step).backward()
    dcp.save({"sparcel": handle.state_dict()}, checkpoint_id=folder)
    found = summed(handle)
    handle.close()
    return found


def summed(handle: sparcel.Handle) -> dict[str, Tensor]:
    """Return by name what is remembered by all replicas together."""
    comm = handle._session.ranks.comm
    sums = memory_of(handle)
    for total in sums.values():
        comm.all_reduce(total)
    return sums


def loaded(comm: Communicator, replicas: int, folder: Path, before: int) -> dict[str, Tensor]:
    mesh = mesh_of(replicas, comm.size // replicas)
    model = shard(Stack(), mesh["shard"])
    handle = attach_evenly(model, "topk", density=0.02, replicate=mesh["replicate"])
    state = {"sparcel": handle.state_dict(saved_by=before)}
    dcp.load(state, checkpoint_id=folder)
    handle.load_state_dict(state["sparcel"])
    found = summed(handle)
    model(comm.rank, 2).backward()
    assert handle.stats().training_steps == 3
    handle.close()
    return found


MESHES = [(2, 4), (4, 2), (1, 2), (8, 1)]
"""Replicas and shards, one after another."""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), list(pairwise([*MESHES, MESHES[0]])))
def test_other_meshes_load_all_that_is_owed(
    run_on: Any, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    (owed, *_) = run_on(before[0] * before[1], saved, before[0], tmp_path)
    assert any(one.any() for one in owed.values())
    for found in run_on(after[0] * after[1], loaded, after[0], tmp_path, before[0]):
        assert found.keys() == owed.keys()
        for name, total in owed.items():
            assert torch.equal(found[name], total * after[0] / before[0]), name


def trained(comm: Communicator, folder: Path, settings: dict[str, Any]) -> list[bool]:
    """Train with a checkpoint in the middle, and once more from there; compare all bits."""
    mesh = mesh_of(2, comm.size // 2)

    def made() -> tuple[Net, torch.optim.Optimizer, sparcel.Handle]:
        model = sharded(mesh["shard"])
        kind = torch.optim.SGD if "momentum" in settings else torch.optim.AdamW
        optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.01)
        attached = sparcel.attach(
            model, "topk", replicate=mesh["replicate"], optimizer=optimizer, **settings
        )
        return model, optimizer, attached

    def go_on(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            loss_of(model, comm.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def found(model: Net, handle: sparcel.Handle) -> list[Tensor]:
        handle.close()
        return [*map(whole, model.state_dict().values()), *memory_of(handle).values()]

    model, optimizer, handle = made()
    go_on(model, optimizer, range(3))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**states, "sparcel": handle.state_dict()}, checkpoint_id=folder)
    go_on(model, optimizer, range(3, 6))
    through = found(model, handle)

    model, optimizer, handle = made()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    state = {**states, "sparcel": handle.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    handle.load_state_dict(state["sparcel"])
    go_on(model, optimizer, range(3, 6))
    again = found(model, handle)
    return list(map(torch.equal, through, again))


@pytest.mark.parametrize(
    "settings", [{"density": 0.05, "scope": "model"}, {"density": 0.1, "momentum": 0.5}]
)
def test_the_same_mesh_goes_on_bit_by_bit(
    run_on: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    for same in run_on(4, trained, tmp_path, settings):
        assert len(same) > 10
        assert all(same)


def refused(comm: Communicator) -> list[str]:
    mesh = mesh_of(2, 1)
    model = shard(Stack(), mesh["shard"])
    handle = attach_evenly(model, "topk", density=0.02, replicate=mesh["replicate"])
    state = handle.state_dict()
    key = "rank0.scale" if "rank0.scale" in state else "rank1.scale"
    said = []
    another = state[key.replace("scale", "blocks.0.large")]
    for load in (
        lambda: handle.load_state_dict({**state, key: whole(state[key])[:7]}),
        lambda: handle.load_state_dict({**state, key: another}),
        handle.full_state_dict,
    ):
        with pytest.raises(InputError) as raised:
            load()
        said.append(str(raised.value))
    handle.close()
    return said


def test_states_that_do_not_fit_are_refused(run_on: Any) -> None:
    for short, other, full in run_on(2, refused):
        assert re.search(r"has 7 elements, the parameter 1600", short)
        assert "must be sharded as the parameter is, (40, 40) by" in other
        assert "save state_dict() by torch.distributed.checkpoint" in full
