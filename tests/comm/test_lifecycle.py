"""The end of communicators: by close(), with the process group, with the interpreter."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from sparcel.comm import TorchCommunicator, resolve
from sparcel.errors import CommunicationError, InputError

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PREAMBLE = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import sparcel
from sparcel.comm import TorchCommunicator, resolve

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


def test_script_that_closes_nothing_ends_well(tmp_path: Path) -> None:
    script = """
        step(start("a"))
    """
    assert run(script, tmp_path) == [(0, ""), (0, "")]


def test_script_that_destroys_the_group_first_ends_well(tmp_path: Path) -> None:
    script = """
        comm = start("a")
        step(comm)
        dist.destroy_process_group()
    """
    assert run(script, tmp_path) == [(0, ""), (0, "")]


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
    """
    assert run(script, tmp_path) == [(0, ""), (0, "")]


def test_jobs_without_a_wait_are_finished_at_exit(tmp_path: Path) -> None:
    script = """
        comm = start("a")
        for _ in range(50):
            comm.submit(lambda: step(comm))
    """
    assert run(script, tmp_path) == [(0, ""), (0, "")]


def test_exit_does_not_wait_for_a_peer_for_long(tmp_path: Path) -> None:
    script = """
        comm = start("a", seconds=1000)
        if comm.rank == 0:
            comm.submit(lambda: step(comm))  # rank 1 never takes part
        else:
            time.sleep(8)
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
    assert "rank 0 closed its communicator before the others" in errors1


def test_interrupted_rank_leaves_and_the_other_is_told(tmp_path: Path) -> None:
    script = """
        comm = start("a", seconds=1000)
        step(comm)
        if comm.rank == 0:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            comm.run(lambda: time.sleep(2) if comm.rank == 0 else step(comm))
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
    if comm.rank == comm.size - 1:
        comm.run(lambda: time.sleep(5.0))
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
