"""What calls take: a clock that all ranks share, from a barrier on, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sparcel.core.comm import Communicator
from sparcel.core.ops import MAX
from sparcel.tools.lab import link_bytes


class Timed(NamedTuple):
    """What a call took, the same on all ranks, but for this rank's ``result``.

    ``ms`` is that of the slowest rank, ``mean_ms`` of an average one, ``cpu_ms`` the processor time
    of an average one. ``volume`` is the larger of the bytes that the communicator sent and
    received, at the worst rank; ``link_bytes`` what crossed the busiest link, in the lab.
    """

    ms: float
    mean_ms: float
    cpu_ms: float
    volume: float
    link_bytes: float
    result: Any


class Clock:
    """The clock of a communicator's ranks."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def timed(self, run: Callable[[], object]) -> Timed:
        """Time a call; all ranks call."""
        self._meet()
        link, before = crossed(), replace(self.comm.traffic)
        seconds, busy, result = took(run)
        now = self.comm.traffic
        sent, received = now.bytes_sent - before.bytes_sent, now.bytes_received
        # On the link nothing is under way before a call, and after it on no rank.
        self._meet()
        volume = max(sent, received - before.bytes_received)
        most = torch.tensor([1e3 * seconds, volume, crossed() - link], dtype=torch.float64)
        total = torch.tensor([1e3 * seconds, 1e3 * busy], dtype=torch.float64)
        self.comm.all_reduce(most, MAX)
        self.comm.all_reduce(total)
        slowest, volume, link = most.tolist()
        return Timed(slowest, *(total / self.comm.size).tolist(), volume, link, result)

    def _meet(self) -> None:
        self.comm.run(lambda: self.comm.gather_numbers(0))


def in_turns(
    jobs: Mapping[Any, Callable[[], Any]], rounds: int, warm: int = 1, repeats: int = 1
) -> dict[Any, list[Any]]:
    """Do all jobs in turns, and return what each returned; ``warm`` rounds before do not count."""
    found: dict[Any, list[Any]] = {name: [] for name in jobs}
    for turn, (name, job) in product(range(-warm, rounds), jobs.items()):
        for _ in range(repeats):
            took = job()
            found[name] += [took] if turn >= 0 else []
    return found


class Took(NamedTuple):
    """What a call took of this process, and what it returned."""

    seconds: float
    cpu_s: float
    result: Any


def took(call: Callable[..., Any], *arguments: Any) -> Took:
    """Call, and take the time and the processor's."""
    start, busy = perf_counter(), process_time()
    result = call(*arguments)
    return Took(perf_counter() - start, process_time() - busy, result)


def alone(job: Callable[..., Any], *arguments: Any) -> Any:
    """Call in a process that ends with the call."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(job, *arguments).result()


@contextmanager
def gloo() -> Iterator[int]:
    """Join the ranks, which have one thread each, over Gloo; give the number of this one."""
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.destroy_process_group()


def gathered(figure: Any) -> list[Any]:
    """Return what each rank has; all call."""
    figures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(figures, figure)
    return figures


def crossed() -> int:
    """Return the bytes that this node's link has sent or received so far: the larger."""
    return max(link_bytes() or (0, 0))


def process_bytes(name: str) -> int:
    """Return what the kernel says of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(found)


def resident() -> int:
    """Return the bytes that are resident, which the peak, ``VmHWM``, begins from."""
    Path("/proc/self/clear_refs").write_text("5")
    return process_bytes("VmRSS")
