"""Arguments that attach accepts and refuses, and the information of its handle."""

from __future__ import annotations

import copy
import gc
import io
import re
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import sparcel
from sparcel.core.comm import Communicator, TorchCommunicator, Traffic
from sparcel.core.training import Stats
from sparcel.errors import CommunicationError, InputError, MismatchError
from tests.ddp.models import (
    LARGE,
    MANY_BUCKETS,
    SHAPES,
    Linear,
    gradient_sums,
    observe,
    residuals_of,
    train,
)
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes


WRONG: tuple[tuple[Any, dict[str, Any], str], ...] = (
    ("topkk", {}, "scheme cannot be 'topkk'; did you mean 'topk' or"),
    ("topk", {"optimzer": None}, "'optimzer'; did you mean 'optimizer'"),
    (None, {"scheme": "topk"}, 'scheme is no argument .* attach\\(model, "topk"\\)'),
    ("topk", {"densty": 0.1}, "did you mean 'density'"),
    ("topk", {"density": 3}, "for a percentage pass density=0.03"),
    ("oktopkk", {}, "did you mean 'oktopk'"),
    ("hitopk", {"ranks_pernode": 2}, "did you mean 'ranks_per_node'"),
    ("hitopk", {"ranks_per_node": 0}, "ranks_per_node must be at least 1, got 0"),
    ("topk", {"warmup": [0.1]}, "needs warmup_steps"),
    ("topk", {"momentum": 1}, "momentum must lie in"),
    ("topk", {"algorithm": "rings"}, "did you mean 'ring'"),
    (sparcel.scheme("topk"), {"density": 0.1}, "settings go with a scheme's name"),
    (["topk"], {}, "scheme must be a Scheme, got list; sparcel.scheme"),
    ("topk", {"density": "0.1"}, "density must be a number, got '0.1'"),
    ("topk", {"optimizer": [0.1]}, "optimizer must be an Optimizer, got 0.1"),
    ("topk", {"scaler": 1024.0}, "scaler must be a GradScaler, got 1024.0"),
    ("topk", {"policy": "dense"}, "policy must be a function, got 'dense'"),
    ("topk", {"densities": [0.1]}, "densities must be a Mapping, got list"),
    ("topk", {"densities": {"first": True}}, r"densities\['first'\] must be a number"),
    ("dense", {"densities": {"forth": 0.1}}, "'forth' fits none of the tensors, which are named"),
    ("topk", {"densities": {"second": 0.1, "*.weight": 0.1}}, r"'\*.weight' fits none"),
    ("topk", {"densities": {"second": 10}}, "for a percentage pass density=0.1"),
    ("dense", {"densities": {"second": 0}}, r"densities\['second'\] must lie in \(0, 1\], got 0"),
    ("auto", {"rates": 1e9}, "rates must be Rates, .* or the path of a file, got 1"),
    ("topk", {"group": "world"}, "group must be a torch.distributed process group"),
    (torch.optim.SGD([torch.ones(1)]), {}, r"got SGD; .* attach\(model, optimizer=\.\.\.\)"),
    (torch.amp.GradScaler("cpu"), {}, r"got GradScaler; .* attach\(model, scaler=\.\.\.\)"),
)
"""Schemes, other arguments, and a part of the error."""


def refuse(comm: Communicator, scheme: Any, settings: dict[str, Any]) -> tuple[str, int]:
    """Return the error of attach, and the number of threads that it left behind."""
    model, threads = DistributedDataParallel(Linear()), threading.active_count()
    with pytest.raises(InputError) as raised:
        attach_evenly(model, scheme, **settings)
    return str(raised.value), threading.active_count() - threads


def refuse_all(comm: Communicator) -> list[tuple[str, int]]:
    return [refuse(comm, scheme, settings) for scheme, settings, _ in WRONG]


def test_wrong_arguments_are_named(run_on: Any) -> None:
    for said in run_on(2, refuse_all):
        for (text, threads), (*_, expected) in zip(said, WRONG, strict=True):
            assert re.search(expected, text), text
            assert threads == 0


def attach_to_fewer(comm: Communicator) -> str:
    ddp = DistributedDataParallel(Linear())
    alone = dist.new_group([comm.rank], use_local_synchronization=True)
    with pytest.raises(InputError) as raised:
        attach_evenly(ddp, "topk", group=alone)
    return str(raised.value)


def test_a_group_of_other_ranks_is_refused(run_on: Any) -> None:
    for said in run_on(2, attach_to_fewer):
        assert "the model is on 2 ranks, group has 1" in said


def attach_to_uneven_nodes(comm: Communicator) -> tuple[str, int]:
    return refuse(comm, "hitopk", {"ranks_per_node": 2})


def test_uneven_nodes_are_refused_before_the_first_step(run_on: Any) -> None:
    for said, threads in run_on(3, attach_to_uneven_nodes):
        assert "nodes must have equally many ranks, got [2, 1]" in said
        assert threads == 0


def attach_differently(comm: Communicator, what: str) -> str:
    ddp = DistributedDataParallel(Linear())
    settings: dict[str, Any] = {}
    if comm.rank == 1 and what == "settings":
        settings = {"density": 0.5}
    if comm.rank == 1 and what == "policy":
        settings = {"policy": lambda name, parameter: True}
    scheme = "gtopk" if comm.rank == 1 and what == "scheme" else "topk"
    with pytest.raises(MismatchError) as raised:
        attach_evenly(ddp, scheme, **settings)
    return str(raised.value)


@pytest.mark.parametrize("what", ["scheme", "settings", "policy"])
def test_ranks_with_different_arguments_are_refused(run_on: Any, what: str) -> None:
    said = run_on(3, attach_differently, what)
    assert "ranks [1] average something else than rank 0, which has TopK(density=0.01" in said[0]
    assert "ranks [0, 2] average something else than rank 1" in said[1]


def train_on_own_communicator(comm: Communicator) -> tuple[Stats, Traffic]:
    """Return the statistics of three steps, and the communicator's counts without two waits."""
    own = TorchCommunicator.of(dist.group.WORLD)
    ddp = DistributedDataParallel(Linear())
    handle = attach_evenly(ddp, "topk", group=own, density=0.05)
    before = replace(own.traffic)
    assert before.bytes_sent > 0  # attach compares the ranks' arguments; statistics leave that out
    for step in range(3):
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
    stats = handle.stats()
    counted = Traffic(
        # Before and after DDP rebuilds its buckets, the ranks wait for one another.
        messages_sent=own.traffic.messages_sent - before.messages_sent - 2,
        bytes_sent=own.traffic.bytes_sent - before.bytes_sent - 2 * 8,
        bytes_received=own.traffic.bytes_received - before.bytes_received - 2 * 8,
    )
    handle.close()
    assert own.run(lambda: own.gather_numbers(5)) == [5, 5]  # the user must close it
    own.close()
    return stats, counted


def test_stats(run_on: Any) -> None:
    elements = {name: torch.zeros(shape).numel() for name, shape in SHAPES.items()}
    coordinates = sum(elements.values())
    small = sum(count for name, count in elements.items() if name not in LARGE)
    selected = -(-coordinates * 5 // 100) + small
    for stats, counted in run_on(2, train_on_own_communicator):
        assert stats.steps == 3
        assert stats.messages_sent == counted.messages_sent == 3 * 2
        assert stats.bytes_sent == counted.bytes_sent > 3 * 8 * (selected - small)
        assert stats.bytes_received == counted.bytes_received > 3 * 8 * (selected - small)
        assert stats.density_before == selected / coordinates
        assert stats.dense_bytes == 3 * 4 * coordinates  # 2(P−1)/P is 1
        assert stats.density_before <= stats.density_after <= 2 * stats.density_before
        assert stats.select_seconds > 0
        assert stats.communicate_seconds > 0


def test_a_step_costs_far_fewer_bytes_than_a_dense_one(run_on: Any) -> None:
    large = {"shapes": {name: SHAPES[name] for name in LARGE}}
    sparse = run_on(2, partial(train, scheme="topk", model=large, frontload=False))
    dense = run_on(2, partial(train, scheme="dense", model=large))
    for mine, theirs in zip(sparse, dense, strict=True):
        assert mine.stats.bytes_sent < theirs.stats.bytes_sent / 30


def attach_twice(comm: Communicator) -> list[dict[str, torch.Tensor]]:
    scheme = sparcel.scheme("topk", density=0.1)
    models = [DistributedDataParallel(Linear()) for _ in range(2)]
    handles = [attach_evenly(ddp, scheme) for ddp in models]
    for number, ddp in enumerate(models):
        ddp(comm.rank, number).backward()
    owed = [residuals_of(handle, comm.rank) for handle in handles]
    for handle in handles:
        handle.close()
    assert scheme.memory is None
    return owed


def attach_once(comm: Communicator, step: int) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(Linear())
    handle = attach_evenly(ddp, sparcel.scheme("topk", density=0.1))
    ddp(comm.rank, step).backward()
    owed = residuals_of(handle, comm.rank)
    handle.close()
    return owed


def test_models_share_no_memory(run_on: Any) -> None:
    alone = [run_on(2, attach_once, step) for step in range(2)]
    for rank, owed in enumerate(run_on(2, attach_twice)):
        for number in range(2):
            for name in LARGE:
                assert torch.equal(owed[number][name], alone[number][rank][name])


def train_copies(comm: Communicator) -> int:
    """Train copies of a model that is attached, made before, between and after its first steps."""
    ddp = DistributedDataParallel(Linear(), **MANY_BUCKETS)
    handle = attach_evenly(ddp, "topk")
    for step in range(3):
        saved = io.BytesIO()
        torch.save(ddp, saved)
        saved.seek(0)
        copies = [copy.deepcopy(ddp), AveragedModel(ddp).module]
        for one in (*copies, torch.load(saved, weights_only=False)):
            one.zero_grad()
            one(comm.rank, step).backward()
            dense = gradient_sums(2, step + 1)
            before = gradient_sums(2, step)
            assert observe(one).keys() == dense.keys()
            for name, found in observe(one).items():
                assert torch.equal(2 * found, dense[name] - before[name])
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
    handle.close()
    return handle.stats().steps


def test_a_copy_has_no_handle_and_exchanges_as_ddp_does(run_on: Any) -> None:
    assert run_on(2, train_copies) == [3, 3]


both = pytest.mark.parametrize("scheme", ["topk", "hitopk"])


def train_after_close(comm: Communicator, scheme: str) -> tuple[str, int]:
    threads = threading.active_count()
    ddp = DistributedDataParallel(Linear())
    handle = attach_evenly(ddp, scheme)
    ddp(comm.rank, 0).backward()
    handle.close()
    handle.close()
    with pytest.raises(CommunicationError) as raised:
        ddp(comm.rank, 1).backward()
    return str(raised.value), threading.active_count() - threads


@both
def test_a_closed_handle_leaves_no_thread_and_says_so(run_on: Any, scheme: str) -> None:
    for said, threads in run_on(2, train_after_close, scheme):
        assert "the handle was closed" in said
        assert threads <= 0


def forget(comm: Communicator, scheme: str) -> list[bool]:
    threads = set(threading.enumerate())
    ddp = DistributedDataParallel(Linear())
    handle = attach_evenly(ddp, scheme)
    ddp(comm.rank, 0).backward()
    new = [thread for thread in threading.enumerate() if thread not in threads]
    assert [thread.name for thread in new] == ["sparcel"]
    del ddp, handle
    gc.collect()
    new[0].join(60)
    return [thread.is_alive() for thread in new]


@both
def test_a_model_that_is_forgotten_leaves_no_thread(run_on: Any, scheme: str) -> None:
    assert run_on(2, forget, scheme) == [[False]] * 2
