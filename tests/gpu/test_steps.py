"""Every scheme does on a GPU what it does on the CPU, bit by bit, and waits in one place alone."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparcel
from sparcel.core import device
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Scheme
from tests.gpu.cuda import GPU, needs_gpu, no_waits
from tests.gpu.models import scheme_named
from tests.sampling import meeting
from tests.schemes.test_on_card import ALL, MOST_READS
from tests.strategies import FLOATS, same_bits

pytestmark = [*needs_gpu, pytest.mark.processes]

SIZES = (1_000, 300_000)
"""From the second one selection begins with a sample."""

STEPS = 3


@dataclass
class Seen:
    """What a rank found: each step's update, the memory at the end, and the waits of each step."""

    updates: list[Tensor] = field(default_factory=list)
    memory: Tensor | None = None
    reads: list[int] = field(default_factory=list)


def gradient_of(rank: int, step: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers, in part the same on all ranks."""
    shared = torch.randn(size, generator=torch.Generator().manual_seed(step))
    own = torch.randn(size, generator=torch.Generator().manual_seed(100 * step + rank))
    return (shared + own).to(dtype)


def steps_there(comm: Communicator, scheme: Scheme, size: int, dtype: torch.dtype) -> Seen:
    """Do steps on the GPU, where none of them may wait but in `device.read`."""
    seen, gradients = Seen(), []
    for step in range(STEPS):
        gradients.append(gradient_of(comm.rank, step, size, dtype).to(GPU))
    for gradient in gradients:
        before = device.reads()
        with no_waits():
            update = scheme.step(gradient, comm)
        seen.reads.append(device.reads() - before)
        seen.updates.append(update.cpu())
    seen.memory = None if scheme.memory is None else scheme.memory.cpu()
    return seen


def steps_here(comm: Communicator, scheme: Scheme, size: int, dtype: torch.dtype) -> Seen:
    """Do the same steps on the CPU."""
    gradients = [gradient_of(comm.rank, step, size, dtype) for step in range(STEPS)]
    updates = [scheme.step(gradient, comm).clone() for gradient in gradients]
    return Seen(updates, None if scheme.memory is None else scheme.memory.clone())


def three_times(
    comm: Communicator, name: str, size: int, dtype: torch.dtype = torch.float32
) -> list[Seen]:
    """Do steps on the CPU, and twice on the GPU."""
    makers = (steps_here, steps_there, steps_there)
    return [make(comm, scheme_named(name, comm.size), size, dtype) for make in makers]


def assert_bits(found: Tensor | None, expected: Tensor | None, where: str) -> None:
    same = same_bits(found, expected)
    if not same and found is not None and expected is not None:
        apart = (found.double() - expected.double()).abs()
        where += f": {int((apart > 0).sum())} of {apart.numel()} differ, by up to {apart.max()}"
    assert same, where


def assert_same(ranks: list[list[Seen]]) -> None:
    """Check that all runs of a rank have the same bits, and all ranks the same updates."""
    for rank, (here, *there) in enumerate(ranks):
        for run, found in enumerate(there):
            for step in range(STEPS):
                where = f"rank {rank}, run {run}, step {step}"
                assert_bits(found.updates[step], here.updates[step], where)
                assert_bits(found.updates[step], ranks[0][1].updates[step], f"{where}, rank 0")
            assert_bits(found.memory, here.memory, f"memory of rank {rank}, run {run}")


@pytest.mark.parametrize(
    ("name", "world_size", "size"),
    [(name, *rest) for name, rest in meeting(ALL, product([2, 3, 4], SIZES), each=2)],
)
def test_steps_have_the_bits_of_the_cpu_in_each_run(
    run_on: Any, name: str, world_size: int, size: int
) -> None:
    assert_same(run_on(world_size, three_times, name, size))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["dense", "topk packed 4 bits", "oktopk by regions"])
def test_gradients_of_every_dtype_have_the_bits_of_the_cpu(
    run_on: Any, name: str, dtype: torch.dtype
) -> None:
    assert_same(run_on(2, three_times, name, 5_000, dtype))


@pytest.mark.parametrize("name", MOST_READS)
def test_the_host_waits_as_often_as_is_said(run_on: Any, name: str) -> None:
    for _, there, _ in run_on(4, three_times, name, 400):
        assert max(there.reads) <= MOST_READS[name]


def corrected(comm: Communicator) -> list[list[Tensor]]:
    """Do steps with momentum and clipping on the CPU and on the GPU."""
    results = []
    for steps in (steps_here, steps_there):
        scheme = sparcel.scheme("topk", density=0.05, momentum=0.9, clip=1.0)
        results.append(steps(comm, scheme, 300_000, torch.float64).updates)
    return results


def test_corrected_momentum_and_clipping_are_close_to_the_cpu(run_on: Any) -> None:
    """The norm is summed up in another order, and its last bits may differ."""
    ranks = run_on(2, corrected)
    for here, there in ranks:
        torch.testing.assert_close(there, here)
        assert all(map(same_bits, there, ranks[0][1]))


def refused(comm: Communicator) -> tuple[bool, bool]:
    """Tell whether torch refuses to wait on this thread and on another one."""
    number, heard = torch.ones(1, device=GPU), []

    def ask() -> None:
        try:
            number.item()
        except RuntimeError as error:
            heard.append("synchronizing" in str(error))

    with no_waits():
        ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert number.item() == 1
    return heard[0], heard[1]


def test_torch_refuses_to_wait_on_every_thread(run_on: Any) -> None:
    """Otherwise the steps above would show nothing."""
    assert run_on(2, refused) == [(True, True)] * 2
