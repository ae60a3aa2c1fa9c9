"""The end of communicators: by close(), with the process group, with the interpreter."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from threading import active_count
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel.core.comm import TorchCommunicator, executor, resolve
from sparcel.core.training import Averager
from sparcel.errors import CommunicationError, InputError

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SOON = 0.3
"""Seconds between two looks of the monitor, but for the one that it waits for already."""

PREAMBLE = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import sparcel
from sparcel.core.comm import TorchCommunicator, resolve

def start(name, seconds=20):
    rank, folder = int(sys.argv[1]), sys.argv[2]
    store = dist.FileStore(f"{folder}/{name}", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=seconds)
    )
    return resolve()

def step(comm):
    comm.gather_numbers(comm.rank)
    total = torch.tensor([1 << comm.rank])
    comm.all_reduce(total)
    assert int(total) == 3
"""


def run(script: str, folder: Path) -> list[tuple[int, str]]:
    """Run a script as two ranks; return exit codes and what they wrote to stderr."""
    program = PREAMBLE + textwrap.dedent(script)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    written = [rank.communicate()[1] for rank in ranks]
    return [(rank.returncode, errors) for rank, errors in zip(ranks, written, strict=True)]


def test_new_process_group_gets_a_new_communicator(tmp_path: Path) -> None:
    script = """
        first = start("a")
        step(first)
        first.close()
        first.close()
        dist.destroy_process_group()
        second = start("b")
        assert second is not first
        step(second)
        dist.destroy_process_group()  # without closing the second
        step(start("c"))
        assert [thread.name for thread in threading.enumerate()].count("sparcel") <= 2
        dist.destroy_process_group()
    """
    assert run(script, tmp_path) == [(0, ""), (0, "")]


def test_jobs_without_a_wait_are_finished_at_exit_though_nothing_is_closed(tmp_path: Path) -> None:
    script = """
        comm = start("a")
        for _ in range(50):
            comm.submit(lambda: step(comm))
    """
    assert run(script, tmp_path) == [(0, ""), (0, "")]


def test_exit_does_not_wait_for_a_peer_for_long(tmp_path: Path) -> None:
    script = """
        from sparcel.core.comm import executor
        executor._EXIT_SECONDS = 1.0
        comm = start("a", seconds=1000)
        if comm.rank == 0:
            comm.submit(lambda: step(comm))  # rank 1 never takes part
        else:
            time.sleep(2.0)
    """
    assert run(script, tmp_path) == [(0, ""), (0, "")]


def test_error_outside_of_a_job_ends_both(tmp_path: Path) -> None:
    script = """
        comm = start("a", seconds=1000)
        step(comm)
        if comm.rank == 0:
            raise ValueError("the user's own")
        step(comm)
    """
    (code0, errors0), (code1, errors1) = run(script, tmp_path)
    assert (code0, code1) == (1, 1)
    assert "ValueError: the user's own" in errors0
    assert "rank 0 failed: ValueError: the user's own" in errors1


def test_interrupted_rank_leaves_and_the_other_is_told(tmp_path: Path) -> None:
    script = """
        comm = start("a", seconds=1000)
        step(comm)
        if comm.rank == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            comm.run(lambda: time.sleep(1) if comm.rank == 0 else step(comm))
        except KeyboardInterrupt:
            sys.exit(5)
    """
    (code0, _), (code1, errors1) = run(script, tmp_path)
    assert (code0, code1) == (5, 1)
    assert "rank 0 failed: KeyboardInterrupt" in errors1


def close_child_early(comm: TorchCommunicator) -> list[int]:
    """Close a child on all ranks but the last, which runs a job before it closes its own."""
    child = comm.split(0)
    child.gather_numbers(child.rank)
    with patch.object(executor, "_FINISH_SECONDS", 0.3):
        if comm.rank == comm.size - 1:
            comm.run(lambda: time.sleep(1.0))
        child.close()
    with pytest.raises(CommunicationError, match="closed"):
        child.gather_numbers(0)
    return comm.gather_numbers(comm.rank)


def test_a_child_closed_early_leaves_its_parent_alive(run_on) -> None:
    assert run_on(3, close_child_early) == [[0, 1, 2]] * 3


def close_parent_first(comm: TorchCommunicator) -> None:
    parent = TorchCommunicator.of(dist.group.WORLD)
    child = parent.split(0)
    parent.close()
    child.close()
    child.close()
    with pytest.raises(CommunicationError, match="closed"):
        child.gather_numbers(0)


def test_a_child_may_be_closed_after_its_parent(run_on) -> None:
    run_on(3, close_parent_first)


def descriptors_and_threads() -> dict[str, int]:
    counts = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")}
    return {**counts, "threading": active_count()}


def split_and_drop(comm: TorchCommunicator) -> None:
    child = comm.split(0)
    child.grid(ranks_per_node=1).across.gather_numbers(child.rank)


def attach_and_drop(comm: TorchCommunicator) -> None:
    model = DistributedDataParallel(torch.nn.Linear(300, 20))
    sparcel.attach(model, "hitopk", ranks_per_node=1)
    model(torch.ones(2, 300)).sum().backward()


def fail_and_drop(comm: TorchCommunicator) -> None:
    tensors = {"weight": torch.arange(5000.0)}
    own = TorchCommunicator.of(dist.group.WORLD)
    averager = Averager(tensors, sparcel.scheme("hitopk", ranks_per_node=1), group=own)
    step = (lambda: averager.average(tensors)) if comm.rank == 0 else lambda: own.run(lambda: 1 / 0)
    with pytest.raises((ZeroDivisionError, CommunicationError)):
        step()


@patch.object(executor, "_MONITOR_SECONDS", SOON)
def grown_after_ten(
    comm: TorchCommunicator, use_and_drop: Callable[[TorchCommunicator], None]
) -> dict[str, tuple[int, int]]:
    """Return the counts before and after ten rounds that grew and stay higher for 20 s."""
    gc.disable()
    try:
        use_and_drop(comm)  # starts threads that stay
        time.sleep(5 * SOON)
        before = descriptors_and_threads()
        for _ in range(10):
            use_and_drop(comm)
        deadline = time.monotonic() + 20.0
        while True:
            after = descriptors_and_threads()
            grown = {name: (before[name], after[name]) for name in before}
            grown = {name: counts for name, counts in grown.items() if counts[1] > counts[0]}
            if not grown or time.monotonic() > deadline:
                return grown
            time.sleep(0.1)
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
@pytest.mark.parametrize("use_and_drop", [split_and_drop, attach_and_drop, fail_and_drop])
def test_what_nobody_closed_leaks_neither_descriptors_nor_threads(run_on, use_and_drop) -> None:
    assert run_on(2, grown_after_ten, use_and_drop) == [{}, {}]


@patch.object(executor, "_MONITOR_SECONDS", SOON)
def drop_before_the_others(comm: TorchCommunicator) -> list[int]:
    """Drop a child on rank 0 while the others go on with it and with its parent."""
    child = comm.split(0)
    child.gather_numbers(child.rank)
    rest = child.split(min(comm.rank, 1))
    if comm.rank == 0:
        del child, rest
    time.sleep(5 * SOON)
    if comm.rank:
        rest.gather_numbers(rest.rank)
    return comm.gather_numbers(comm.rank)


def test_ranks_may_drop_a_child_before_the_others(run_on) -> None:
    assert run_on(3, drop_before_the_others) == [[0, 1, 2]] * 3


def connect_anew(comm: TorchCommunicator) -> tuple[str, list[int]]:
    group = dist.new_group()
    first = resolve(group)

    def job() -> list[int]:
        if comm.rank == 1:
            raise InputError("density must lie in (0, 1], got 3")
        return first.gather_numbers(comm.rank)

    with pytest.raises((InputError, CommunicationError), match="density must lie"):
        first.run(job)
    assert resolve(group) is first
    with pytest.raises(CommunicationError) as dead:
        first.run(job)
    resolve(group).close()
    second = resolve(group)
    assert second is not first
    numbers = second.gather_numbers(10 + comm.rank)
    second.close()
    return str(dead.value), numbers


def test_ranks_connect_anew_once_all_have_closed_a_failed_communicator(run_on) -> None:
    text = (
        "the communicator is dead: rank 1 failed: InputError: density must lie in (0, 1], got 3; "
        "to connect anew, close it on all ranks with sparcel.comm.resolve(group).close()"
    )
    assert run_on(3, connect_anew) == [(text, [10, 11, 12])] * 3
