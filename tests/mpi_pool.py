"""A pool of MPI ranks for tests, like `tests.workers`: all worlds are parts of one MPI job.

The pool launches the job itself, with the lab's server of PMI-1, which MPICH and its relatives use.
So ranks are forked from a process that has imported torch, where ``mpiexec`` would start eight
interpreters.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

from sparcel.tools.lab.pmi import PmiServer
from tests.workers import WORLD_SIZES, Pool, World, join_gloo, joined, serve, start_worker

_RANKS = max(WORLD_SIZES)


class MpiPool(Pool):
    """Ranks of one MPI job, the first of which form a world."""

    def __init__(self) -> None:
        super().__init__()
        self._pmi: PmiServer | None = None

    @property
    def join(self) -> Callable[[int, World], None]:
        return _join

    @property
    def part(self) -> Callable[[int], None]:
        return _part

    def hire(self, count: int) -> None:
        if self._pmi is not None:
            return
        pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
        pmi = self._pmi = PmiServer(1, _RANKS)
        for rank in range(_RANKS):
            with socket.socket(fileno=os.dup(pmi.descriptor(rank))) as end:
                self._workers.append(start_worker(_serve_rank, end, pmi.environment(rank)))
            pmi.started(rank)

    def kill(self, show_stacks: bool = False) -> None:
        super().kill(show_stacks)
        if self._pmi is not None:
            self._pmi.close()
            self._pmi = None


# The rest of this file runs in the ranks; only they may initialise MPI.

_groups: list[Any] = []


def _serve_rank(pipe: Connection, end: socket.socket, environment: dict[str, str]) -> None:
    """Serve as an MPI rank; UCX is told which transports exist everywhere."""
    defaults = {"UCX_TLS": "tcp,self", "OMP_NUM_THREADS": "1"}
    os.environ.update({**defaults, **os.environ, **environment, "PMI_FD": str(end.detach())})
    from mpi4py import MPI

    assert MPI.COMM_WORLD.size == _RANKS, "these tests need MPICH, or another MPI with PMI-1"
    serve(pipe)


def _join(rank: int, world: World) -> None:
    from mpi4py import MPI

    from sparcel.core.comm.mpi import MpiCommunicator

    join_gloo(rank, world)  # for code that needs a default process group besides MPI
    ranks = MPI.COMM_WORLD.group.Incl(list(range(world.size)))
    _groups.append(MPI.COMM_WORLD.Create_group(ranks))
    joined.append(MpiCommunicator.of(_groups[-1], world.timeout))


def _part(rank: int) -> None:
    joined.pop().close()
    _groups.pop().Free()
    dist.destroy_process_group()
