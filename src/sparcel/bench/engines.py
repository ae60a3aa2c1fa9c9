"""The engines of a run: sparcel's communicator on each, and the engine's own all-reduce."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.comm import Communicator, launched, resolve
from sparcel.errors import InputError, optional

ENGINES = ("gloo", "mpi")


class BenchEngine(ABC):
    """An engine: sparcel's communicator on it, and its own all-reduce."""

    name: str
    comm: Communicator
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """Dtypes that `all_reduce` sums."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a dense tensor over all ranks, in place, by the engine's own call alone."""

    def close(self) -> None:
        """Disconnect; all ranks call."""
        self.comm.close()


class Gloo(BenchEngine):
    """torch.distributed's default process group."""

    name = "gloo"

    def __init__(self) -> None:
        self.comm = resolve(None)

    def all_reduce(self, tensor: Tensor) -> None:
        """See `BenchEngine.all_reduce`; also sums sparse COO tensors."""
        dist.all_reduce(tensor)

    def close(self) -> None:
        """See `BenchEngine.close`."""
        super().close()
        dist.destroy_process_group()


class Mpi(BenchEngine):
    """MPI's world."""

    name = "mpi"
    dtypes = (torch.float32,)  # MPI has no bfloat16

    def __init__(self) -> None:
        with optional("MPI", "mpi"):
            from mpi4py import MPI

        self.comm = resolve(MPI.COMM_WORLD)
        self._world = MPI.COMM_WORLD.Dup()
        self._in_place = MPI.IN_PLACE

    def all_reduce(self, tensor: Tensor) -> None:
        """See `BenchEngine.all_reduce`."""
        self._world.Allreduce(self._in_place, tensor.numpy())

    def close(self) -> None:
        """See `BenchEngine.close`."""
        super().close()
        self._world.Free()


@contextmanager
def connected(names: tuple[str, ...]) -> Iterator[list[BenchEngine]]:
    """Connect the ranks by these engines; all ranks call.

    Raises
    ------
    InputError
        When MPI is asked for and no MPI launcher started this process.
    """
    there = launched()
    for name in names:
        if name not in there:
            raise InputError(
                f"engine {name!r} needs its own launcher, but this process was launched for"
                f" {', '.join(there) or 'no engine'}: start with mpiexec, or with"
                " `sparcel lab run --mpi`"
            )
    with ExitStack() as stack:
        engines: list[BenchEngine] = []
        if "mpi" in names:
            from sparcel.comm.mpi import exit_after_failure

            # After a failure, ranks that already died must not leave the others in MPI_Finalize.
            stack.enter_context(exit_after_failure())
            engines.append(stack.enter_context(closing(Mpi())))
        if "gloo" in names:
            _join_gloo()
            engines.insert(0, stack.enter_context(closing(Gloo())))
        yield engines


def _join_gloo() -> None:
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        dist.init_process_group("gloo")
        return
    with optional("MPI", "mpi"):
        from mpi4py import MPI

    world = MPI.COMM_WORLD
    names = world.allgather(socket.gethostname())
    alone = len(set(names)) == 1
    if alone and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Otherwise Gloo looks up the machine's own name, for seconds if no name server answers.
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    host = "127.0.0.1" if alone else socket.gethostbyname(names[0])
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    address = f"tcp://{host}:{world.bcast(port)}"
    dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
