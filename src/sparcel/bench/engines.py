"""The engines of a run: sparcel's communicator on each, and the engine's own all-reduce."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.comm import Communicator, launched, resolve
from sparcel.errors import InputError, optional

ENGINES = ("gloo", "mpi")


@dataclass(frozen=True)
class BenchEngine:
    """An engine: sparcel's communicator on it, and its own all-reduce.

    Attributes
    ----------
    all_reduce
        Sums a dense tensor over all ranks, in place, by the engine's own call alone; Gloo's also
        sums sparse COO tensors.
    dtypes
        Dtypes that it sums.
    """

    name: str
    comm: Communicator
    all_reduce: Callable[[Tensor], object]
    dtypes: tuple[torch.dtype, ...]


@contextmanager
def _gloo() -> Iterator[BenchEngine]:
    """Connect the ranks by torch.distributed's default process group."""
    _join_gloo()
    comm = resolve(None)
    try:
        yield BenchEngine("gloo", comm, dist.all_reduce, (torch.float32, torch.bfloat16))
    finally:
        comm.close()
        dist.destroy_process_group()


@contextmanager
def _mpi() -> Iterator[BenchEngine]:
    """Connect the ranks by MPI's world."""
    with optional("MPI", "mpi"):
        from mpi4py import MPI
    from sparcel.comm.mpi import exit_after_failure

    def all_reduce(tensor: Tensor) -> None:
        world.Allreduce(MPI.IN_PLACE, tensor.numpy())

    # After a failure, ranks that already died must not leave the others in MPI_Finalize.
    with exit_after_failure():
        comm, world = resolve(MPI.COMM_WORLD), MPI.COMM_WORLD.Dup()
        try:
            yield BenchEngine("mpi", comm, all_reduce, (torch.float32,))  # MPI has no bfloat16
        finally:
            comm.close()
            world.Free()


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
        # MPI first: it tells the ranks how to join Gloo's group.
        engines = [
            stack.enter_context(connect())
            for name, connect in (("mpi", _mpi), ("gloo", _gloo))
            if name in names
        ]
        yield engines[::-1]


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
