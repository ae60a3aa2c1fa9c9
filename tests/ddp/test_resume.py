"""Resuming with velocity, on other nodes, and from states with or without velocity."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel.core.comm import Communicator
from sparcel.core.schemes import GTopK, Hierarchical, OkTopK, ScaleCom, Scheme
from sparcel.errors import InputError
from tests.ddp.models import (
    LARGE,
    MANY_BUCKETS,
    Linear,
    known_gradient,
    observe,
    residuals_of,
)
from tests.evenly import attach_evenly
from tests.sampling import meeting

pytestmark = pytest.mark.processes

Named = dict[str, Tensor]
Parts = dict[str, Named]


def remembered(handle: sparcel.Handle, rank: int) -> Parts:
    return {kind: residuals_of(handle, rank, kind) for kind in ("rank", "velocity")}


def attached(scheme: Scheme, double: bool) -> tuple[DistributedDataParallel, sparcel.Handle]:
    dtypes = dict.fromkeys(LARGE, torch.float64) if double else None
    ddp = DistributedDataParallel(Linear(dtypes=dtypes), **MANY_BUCKETS)
    return ddp, attach_evenly(ddp, scheme)


def owe(comm: Communicator, scheme: Scheme, folder: Path, double: bool = False) -> Parts:
    """Save the state after three steps, and return it."""
    ddp, handle = attached(scheme, double)
    for step in range(3):
        ddp(comm.rank, step).backward()
        ddp.zero_grad()
    state = handle.state_dict()
    dcp.save({"sparcel": state}, checkpoint_id=folder / "dcp")
    torch.save(state, folder / f"{comm.rank}.pt")
    owed = remembered(handle, comm.rank)
    handle.close()
    return owed


def inherit(
    comm: Communicator, scheme: Scheme, saved_by: int, folder: Path, double: bool = False
) -> list[Parts]:
    """Load the states of ``saved_by`` ranks; return them, and state and updates after two steps."""
    ddp, handle = attached(scheme, double)
    state = handle.state_dict(saved_by)
    dcp.load({"sparcel": state}, checkpoint_id=folder / "dcp")
    handle.load_state_dict(state)
    seen = [remembered(handle, comm.rank)]
    for step in (7, 8):  # DDP rebuilds its buckets before the second one
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
        seen.append({**remembered(handle, comm.rank), "update": observe(ddp)})
    handle.close()
    return seen


def total(ranks: list[Parts], kind: str, name: str) -> Tensor:
    return torch.stack([parts[kind][name] for parts in ranks]).sum(0)


def gradients(ranks: int, name: str, step: int) -> Tensor:
    parameter = Linear().get_parameter(name)
    parts = [known_gradient(name, parameter, rank, step).double() for rank in range(ranks)]
    return torch.stack(parts).sum(0).flatten()


MOVES = [(4, 2, 2, 2), (4, 4, 4, 1), (2, 1, 4, 4), (1, 1, 2, 2)]


@pytest.mark.parametrize(("move", "double"), meeting(MOVES, [False, True], each=1))
def test_other_ranks_and_other_nodes_inherit_all_that_is_owed(
    run_on: Any, tmp_path: Path, move: tuple[int, int, int, int], double: bool
) -> None:
    old, old_node, new, new_node = move
    inner = OkTopK(momentum=0.5)
    owed = run_on(old, owe, Hierarchical(inner, old_node), tmp_path, double)
    scheme = Hierarchical(inner, new_node)
    loaded, *steps = zip(*run_on(new, inherit, scheme, old, tmp_path, double), strict=True)
    for name in LARGE:
        for kind in ("rank", "velocity"):
            assert total(owed, kind, name).any()
            assert torch.equal(total(loaded, kind, name), total(owed, kind, name) * new / old)
        before = loaded
        for number, after in zip((7, 8), steps, strict=True):
            entered = 0.5 * total(before, "velocity", name) + gradients(new, name, number)
            came_out = new * after[0]["update"][name]
            kept = total(after, "rank", name) - total(before, "rank", name)
            assert torch.equal(kept + came_out, entered)
            before = after


def without_velocity(comm: Communicator, folder: Path, kind: str) -> list[Parts]:
    """Resume with momentum from a state saved without momentum."""
    ddp, handle = attached(GTopK(momentum=0.5), double=False)
    if kind == "dcp":
        state = handle.state_dict()
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"sparcel": state}, checkpoint_id=folder / "dcp", planner=planner)
    else:
        state = torch.load(folder / f"{comm.rank}.pt")
    handle.load_state_dict(state)
    seen = [remembered(handle, comm.rank)]
    ddp(comm.rank, 7).backward()
    seen.append(remembered(handle, comm.rank))
    handle.close()
    return seen


@pytest.mark.parametrize("kind", ["dcp", "torch.save"])
def test_states_without_velocity_load_and_velocity_starts_at_zero(
    run_on: Any, tmp_path: Path, kind: str
) -> None:
    owed = run_on(2, owe, GTopK(), tmp_path)
    assert not owed[0]["velocity"]
    for rank, (loaded, after) in enumerate(run_on(2, without_velocity, tmp_path, kind)):
        for name in LARGE:
            assert torch.equal(loaded["rank"][name], owed[rank]["rank"][name])
            assert not loaded["velocity"][name].any()
        assert any(after["velocity"][name].any() for name in LARGE)


def with_velocity_to_spare(comm: Communicator, folder: Path) -> tuple[Parts, list[str]]:
    """Resume without momentum from a state saved with momentum."""
    ddp, handle = attached(Hierarchical(GTopK(), 2), double=False)
    handle.load_state_dict(torch.load(folder / f"{comm.rank}.pt"))
    ddp(comm.rank, 7).backward()
    state, rest = handle.state_dict(), remembered(handle, comm.rank)
    handle.close()
    rest["update"] = observe(ddp)
    return rest, [key for key in state if key.startswith("velocity")]


def test_a_saved_velocity_is_ignored_without_momentum(run_on: Any, tmp_path: Path) -> None:
    owed = run_on(2, owe, GTopK(momentum=0.5), tmp_path)
    rests, keys = zip(*run_on(2, with_velocity_to_spare, tmp_path), strict=True)
    assert keys == ([], [])
    for name in LARGE:
        came_out = 2 * rests[0]["update"][name] + total(rests, "rank", name)
        assert torch.equal(came_out, total(owed, "rank", name) + gradients(2, name, 7))


def load_wrong(comm: Communicator) -> list[str]:
    ddp, handle = attached(GTopK(momentum=0.5), double=False)
    ddp(comm.rank, 0).backward()
    good = handle.state_dict()
    key = f"velocity{comm.rank}.first"
    assert good[key].any()
    said = []
    for bad in ({key: good[key][1:]}, {f"{key}st": good[key]}, {f"speed{comm.rank}.first": 0}):
        with pytest.raises(InputError) as raised:
            handle.load_state_dict({**good, **bad})
        said.append(str(raised.value))
    assert torch.equal(handle.state_dict()[key], good[key])
    handle.close()
    return said


def test_bad_velocities_are_named(run_on: Any) -> None:
    for rank, said in enumerate(run_on(2, load_wrong)):
        assert f"'velocity{rank}.first' has 2559 elements, the parameter 2560" in said[0]
        assert f"'velocity{rank}.firstst' fits no tensor" in said[1]
        assert f"'speed{rank}.first' is no entry" in said[2]


def filtered_resume(comm: Communicator, nodes: int | None) -> tuple[list[Named], list[Named]]:
    """Return the updates of an uninterrupted training, and of an interrupted one.

    β changes while it is interrupted, for the one that is not.
    """
    scheme: Scheme = ScaleCom(0.05, beta=0.5, beta_steps=3)
    scheme = scheme if nodes is None else Hierarchical(scheme, nodes)

    def steps(state: dict[str, Tensor] | None, numbers: range) -> tuple[list[Named], Any]:
        ddp = DistributedDataParallel(Linear(), find_unused_parameters=True)  # never rebuilt
        handle, updates = attach_evenly(ddp, scheme), []
        if state is not None:
            handle.load_state_dict(state)
        for step in numbers:
            ddp.zero_grad()
            ddp(comm.rank, step).backward()
            updates.append(observe(ddp))
        saved = handle.state_dict()
        handle.close()
        return updates, saved

    first, state = steps(None, range(3))
    return steps(None, range(6))[0], first + steps(state, range(3, 6))[0]


@pytest.mark.parametrize("nodes", [None, 2])
def test_a_changing_filter_continues_as_if_not_interrupted(run_on: Any, nodes: Any) -> None:
    for through, interrupted in run_on(4, partial(filtered_resume, nodes=nodes)):
        for update, other in zip(through, interrupted, strict=True):
            assert all(torch.equal(update[name], other[name]) for name in update)
