"""After a failure every survivor raises its cause, and keeps its memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Hierarchical, OkTopK, Scheme, TopK
from sparcel.errors import CommunicationError
from tests.ddp.models import (
    LARGE,
    MANY_BUCKETS,
    Linear,
    gradient_sums,
    observe,
    residuals_of,
)
from tests.evenly import attach_evenly
from tests.workers import run_apart

pytestmark = pytest.mark.processes


@dataclass
class Broken:
    """A step that failed: its error, and the memory before and after it."""

    error: Exception | None = None
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    velocity_stayed: bool = True
    steps: int = 0


def assert_memory_kept(broken: Broken) -> None:
    assert broken.steps == 2
    assert broken.velocity_stayed
    assert broken.before.keys() == broken.after.keys() == set(LARGE)
    for name in LARGE:
        assert broken.before[name].any()
        assert torch.equal(broken.before[name], broken.after[name])


def attempt(
    comm: Communicator,
    ddp: DistributedDataParallel,
    handle: sparcel.Handle,
    trouble: Callable[[], None],
    place: str = "second",
) -> Broken:
    """Do two steps, and a third one with ``trouble`` in the backward pass, at ``place``.

    At "third" no bucket is ready; at "second" one of three is ready.
    """
    for step in range(2):
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
    broken = Broken(before=residuals_of(handle, comm.rank))
    velocity = residuals_of(handle, comm.rank, "velocity")
    hook = ddp.module.get_parameter(place).register_hook(lambda gradient: trouble())
    try:
        ddp(comm.rank, 2).backward()
    except Exception as error:
        broken.error = error.with_traceback(None)  # whoever keeps that keeps the model
    hook.remove()
    broken.after, broken.steps = residuals_of(handle, comm.rank), handle.stats().steps
    later = residuals_of(handle, comm.rank, "velocity")
    broken.velocity_stayed = all(torch.equal(velocity[name], later[name]) for name in velocity)
    return broken


def no_trouble() -> None:
    """Continue the backward pass."""


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    raise LookupError("a user's mistake")


def train_with_trouble(
    comm: Communicator,
    trouble: Callable[[], None],
    rank: int,
    scheme: str | Scheme = "topk",
    place: str = "second",
) -> Broken:
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    handle = attach_evenly(ddp, scheme)
    return attempt(comm, ddp, handle, trouble if comm.rank == rank else no_trouble, place)


KILLED = {
    "topk": (3, "topk"),
    "oktopk between nodes": (4, Hierarchical(OkTopK(momentum=0.5), 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_survivors_of_a_killed_rank_raise_and_keep_their_memory(name: str) -> None:
    ranks, scheme = KILLED[name]
    outcomes = run_apart(ranks, train_with_trouble, killed, 1, scheme, timeout=30)
    assert outcomes.pop(1).died == -signal.SIGKILL
    for outcome in outcomes:
        broken = outcome.result
        assert type(broken.error) is CommunicationError
        assert "rank 1" in str(broken.error)
        assert_memory_kept(broken)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["third", "second"])
def test_a_rank_whose_backward_raises_is_detected_after_the_timeout(place: str) -> None:
    outcomes = run_apart(2, train_with_trouble, raise_error, 1, "topk", place, timeout=3)
    assert type(outcomes[1].result.error) is LookupError
    assert type(outcomes[0].result.error) is CommunicationError
    assert "rank 1" in str(outcomes[0].result.error)
    for outcome in outcomes:
        assert_memory_kept(outcome.result)


class Broke(TopK):
    """Fails on rank 1 after two steps."""

    def begin(self, gradient: Tensor, comm: Communicator, *rest: Any, **more: Any) -> Any:
        if self.steps == 2 and comm.rank == 1:
            raise LookupError("a scheme's mistake")
        return super().begin(gradient, comm, *rest, **more)


def recover(comm: Communicator, trouble: Any, scheme: Any) -> dict[str, Any]:
    """Fail in a step, then wrap and attach again with the old memory, and repeat the step.

    Nothing collects garbage in between, so the old wrapper has to be gone without it.
    """
    gc.collect()
    gc.disable()
    try:
        return fail_and_repeat(comm, trouble, scheme)
    finally:
        gc.enable()


def fail_and_repeat(comm: Communicator, trouble: Any, scheme: Any) -> dict[str, Any]:
    model = Linear()
    ddp = DistributedDataParallel(model, **MANY_BUCKETS)
    handle = attach_evenly(ddp, scheme)
    broken = attempt(comm, ddp, handle, trouble)
    with pytest.raises(RuntimeError):  # DDP raises it because it cannot continue
        ddp(comm.rank, 2).backward()
    state = handle.state_dict()
    handle.close()

    model.zero_grad()
    ddp = DistributedDataParallel(model, **MANY_BUCKETS)
    handle = attach_evenly(ddp, "topk" if isinstance(scheme, Broke) else scheme)
    handle.load_state_dict(state)
    ddp(comm.rank, 2).backward()
    after = residuals_of(handle, comm.rank)
    handle.close()
    return {"broken": broken, "update": observe(ddp), "after": after}


class BrokeAtOnce(TopK):
    """Fails on rank 1 in its first step."""

    def begin(self, gradient: Tensor, comm: Communicator, *rest: Any, **more: Any) -> Any:
        if comm.rank == 1:
            raise LookupError("a scheme's mistake")
        return super().begin(gradient, comm, *rest, **more)


def fail_at_once(comm: Communicator, wrap: dict[str, Any]) -> Exception:
    ddp = DistributedDataParallel(Linear(), **wrap)
    handle = attach_evenly(ddp, BrokeAtOnce())
    with pytest.raises(Exception) as raised:  # noqa: PT011  # the test checks the type
        ddp(comm.rank, 0).backward()
    handle.close()
    return raised.value


@pytest.mark.parametrize(
    "wrap",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=["dynamic", "static", "unused"],
)
def test_the_first_step_can_fail_as_well(run_on: Any, wrap: dict[str, Any]) -> None:
    first, second = run_on(2, fail_at_once, wrap)
    assert type(first) is CommunicationError
    assert "rank 1 failed: LookupError: a scheme's mistake" in str(first)
    assert type(second) is LookupError


@pytest.mark.parametrize(
    ("trouble", "scheme"),
    [(raise_error, "topk"), (no_trouble, Broke()), (raise_error, Hierarchical(OkTopK(), 2))],
    ids=["the backward pass", "a scheme", "a node's backward pass"],
)
def test_a_failed_step_can_be_repeated_with_the_old_memory(
    run_on: Any, trouble: Any, scheme: Any
) -> None:
    ranks = run_on(2, partial(recover, trouble=trouble, scheme=scheme))
    for rank, result in enumerate(ranks):
        error = result["broken"].error
        if trouble is raise_error or rank == 1:
            assert type(error) is LookupError
            assert "mistake" in str(error)
        else:
            assert type(error) is CommunicationError
            assert "rank 1 failed: LookupError: a scheme's mistake" in str(error)
        assert_memory_kept(result["broken"])
    done, all_steps = gradient_sums(2, passes=2), gradient_sums(2, passes=3)
    for name in LARGE:
        before = sum(result["broken"].before[name] for result in ranks)
        after = sum(result["after"][name] for result in ranks)
        step = all_steps[name] - done[name]
        assert torch.equal(2 * ranks[0]["update"][name] + after, before + step)


SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sparcel

dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
model = DistributedDataParallel(torch.nn.Linear(40, 40))
handle = sparcel.attach(model, sys.argv[4])  # which has to live until the end
for _ in range(3):
    model(torch.ones(2, 40)).sum().backward()
if sys.argv[3] == "destroy":  # without closing the handle before
    dist.destroy_process_group()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "scheme"), [("destroy", "topk"), ("leave", "hitopk")])
def test_processes_end_cleanly(tmp_path: Any, how: str, scheme: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    meeting = f"file://{tmp_path / 'meeting'}"
    processes = [
        subprocess.Popen(
            [sys.executable, script, meeting, str(rank), how, scheme],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        out, errors = process.communicate(timeout=240)
        # Older versions of Gloo print a line as well.
        assert process.returncode == 0, errors
        assert out.endswith("done\n")
        assert "Traceback" not in errors
