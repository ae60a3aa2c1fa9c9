"""The engines, and the rows of the table: for each a call to time, and a check of its result."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.core import auto
from sparcel.core.collectives import ALGORITHMS, gtopk, oktopk
from sparcel.core.comm import Communicator, launched, resolve, ring_bytes
from sparcel.core.formats import RAW, Format
from sparcel.core.schemes import ON_NODES, SCHEMES, SEND_ALL, Scheme, scheme
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.errors import InputError, checked_name, optional
from sparcel.tools.bench.inputs import Case, Sum, count_wrong, sum_of, tree_largest


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
    from sparcel.core.comm.mpi import exit_after_failure

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


DENSE = {"dense fp32": torch.float32, "dense bf16": torch.bfloat16}
"""Baselines that do not depend on the density."""

AS_MANY_BYTES = "dense 2k"
"""The engine's all-reduce of 2k float32, as many bytes as a stream has."""

SPARSE_COO = "sparse_coo"


@dataclass
class Contender:
    """One row of the table.

    Attributes
    ----------
    run
        The call to time.
    wrong
        Counts the wrong coordinates of a result of ``run``.
    reset
        Prepares a call of ``run``; not timed.
    bytes
        Bytes that a rank sends or receives, for the engine's own calls, which have no counter; None
        for other rows.
    """

    run: Callable[[], Any]
    wrong: Callable[[Any], int]
    reset: Callable[[], object] = lambda: None
    bytes: int | None = None


def dense(case: Case, engine: BenchEngine, dtype: torch.dtype) -> Contender | None:
    """Return the engine's sum of whole vectors, or None if the engine does not have the dtype."""
    if dtype not in engine.dtypes:
        return None
    source = case.streams[engine.comm.rank].to_dense()
    expected = case.total
    if dtype != torch.float32:  # half precision is exact for sums of signs
        source.sign_()
        expected = sum_of([_signs(stream) for stream in case.streams])
    return _by_engine(engine, source.to(dtype), expected)


def _signs(stream: SparseStream) -> SparseStream:
    return SparseStream.unchecked(stream.indices, stream.values.sign(), stream.size)


def as_many_bytes(case: Case, engine: BenchEngine) -> Contender:
    """Return the engine's sum of short dense vectors, of 2k coordinates each."""

    def vector(rank: int) -> SparseStream:
        values = torch.zeros(2 * case.k)  # a real gradient's stream may have fewer than k entries
        values[: case.streams[rank].nnz] = case.streams[rank].values
        return SparseStream.unchecked(None, values, 2 * case.k)

    vectors = [vector(rank) for rank in range(case.ranks)]
    return _by_engine(engine, vectors[engine.comm.rank].values, sum_of(vectors))


def _by_engine(engine: BenchEngine, source: Tensor, expected: Sum) -> Contender:
    """Return the engine's sum of dense tensors, in place, as in a program without sparcel."""
    tensor, ranks = torch.empty_like(source), engine.comm.size

    def run() -> Tensor:
        engine.all_reduce(tensor)
        return tensor

    return Contender(
        run,
        lambda result: count_wrong(result, expected),
        reset=lambda: tensor.copy_(source),
        bytes=ring_bytes(source.nbytes, ranks),
    )


def sparse_coo(case: Case, engine: BenchEngine) -> Contender:
    """Return Gloo's own sparse all-reduce of COO tensors, which gathers all of them."""
    own = case.streams[engine.comm.rank]
    assert own.indices is not None, "selections are sparse"
    indices = own.indices.long()[None]
    held: list[Tensor] = []

    def reset() -> None:
        # The all-reduce replaces the tensor's indices and values by those of the sum.
        parts = (indices, own.values, (case.size,))
        held[:] = [torch.sparse_coo_tensor(*parts, check_invariants=False, is_coalesced=True)]

    def run() -> Tensor:
        engine.all_reduce(held[0])
        return held[0]

    def wrong(result: Tensor) -> int:
        sums = result.coalesce()
        found = SparseStream(sums.indices()[0], sums.values(), case.size)
        return count_wrong(found, case.total)

    entry_bytes = indices.itemsize + own.values.itemsize
    return Contender(run, wrong, reset, bytes=(case.ranks - 1) * case.k * entry_bytes)


EXCHANGES = ("gtopk", "oktopk")
STEP = "step:"

Exchanged = tuple[SparseStream, list[SparseStream]]
"""The result of an exchange, and what this rank lost and dropped."""

_NEAR = 0.01
"""Values are whole numbers, of which averages, and what rounding takes, are inexact fractions."""


def names(asked: str, whole_step: bool, ranks_per_node: int) -> list[str]:
    """Return the names of the rows to measure, baselines first.

    ``asked`` is "all" or names separated by commas. With ``whole_step`` a scheme's name also
    selects its step.

    Raises
    ------
    InputError
        When a name does not exist.
    """
    schemes = [name for name in SCHEMES if ranks_per_node > 1 or name not in ON_NODES]
    every = [*DENSE, AS_MANY_BYTES, SPARSE_COO, "auto", *ALGORITHMS, *EXCHANGES]
    steps = [STEP + name for name in schemes]
    if asked == "all":
        return every + (steps if whole_step else [])
    chosen = ["dense fp32"]
    for name in (part.strip() for part in asked.split(",")):
        step = STEP + name
        if name in every or step not in steps or not whole_step:
            chosen.append(checked_name(name, [*every, *steps], "algorithm"))
        if whole_step and step in steps:
            chosen.append(step)
    return sorted(dict.fromkeys(chosen), key=lambda name: name not in DENSE)


def contender(
    name: str, case: Case, engine: BenchEngine, ranks_per_node: int, format: Format = RAW
) -> Contender | None:
    """Return the row ``name`` of a case, or None if the engine does not support it."""
    if name in DENSE:
        return dense(case, engine, DENSE[name])
    if name == AS_MANY_BYTES:
        return as_many_bytes(case, engine)
    if name == SPARSE_COO:
        return sparse_coo(case, engine) if engine.name == "gloo" else None
    if name.startswith(STEP):
        return _step(name.removeprefix(STEP), case, engine, ranks_per_node, format)
    return _exchange(name, case, engine, format)


def _exchange(name: str, case: Case, engine: BenchEngine, format: Format) -> Contender:
    """Return an exchange of streams: a sum, or a selection from one."""
    comm, k = engine.comm, case.k
    own = case.streams[comm.rank]

    def job() -> Exchanged:
        wire = Wire(comm, format)
        if name in EXCHANGES:
            found = gtopk(own, wire, k) if name == "gtopk" else oktopk(own, wire, k, k)
            total, kept = found.total, [found.dropped]
        else:
            total, kept = auto.all_reduce(own, wire, algorithm=name, max_nnz=k), []
        return total, kept + [part.placed(at, own.size) for at, part in wire.take_lost()]

    def wrong(result: Exchanged) -> int:
        total, kept = result
        if not format.loses:
            return count_wrong(total, _expected(name, case))
        # What came, and what all ranks lost and dropped, add up to all streams.
        balance = torch.zeros(own.size)
        for part in kept:
            balance += part.to_dense()
        engine.all_reduce(balance)
        balance += total.to_dense()
        balance[case.total.indices] -= case.total.values.to(balance.dtype)
        return int((balance.abs() > _NEAR).sum())

    return Contender(lambda: comm.run(job), wrong)


def _expected(name: str, case: Case) -> Sum:
    if name == "gtopk":
        return tree_largest(case.streams, case.k)
    return case.total.largest(case.k) if name == "oktopk" else case.total


def _step(
    name: str, case: Case, engine: BenchEngine, ranks_per_node: int, format: Format
) -> Contender:
    """Return a whole step: accumulate, select, exchange, and update the parameters.

    Every iteration begins with an empty memory, so that selections keep their distribution.
    """
    comm = engine.comm
    settings: dict[str, Any] = {}
    if name not in SEND_ALL:
        settings = {"density": case.density, "format": format}
    if name in ON_NODES:
        settings["ranks_per_node"] = ranks_per_node
    made = scheme(name, **settings)
    gradient = case.gradient(comm.rank)
    update, parameters = torch.empty_like(gradient), torch.zeros_like(gradient)

    def run() -> Tensor:
        made.step(gradient, comm, out=update)
        parameters.sub_(update)
        return update

    return Contender(
        run,
        lambda update: _lost(made, gradient, update, engine),
        reset=made.forget,
    )


def _lost(made: Scheme, gradient: Tensor, update: Tensor, engine: BenchEngine) -> int:
    """Count the coordinates at which update and memories do not add up to the gradients.

    Each rank checks its own update. All values are whole numbers.
    """
    balance = gradient.clone()
    if made.memory is not None:
        balance -= made.memory
    engine.all_reduce(balance)
    return int(((balance - update * engine.comm.size).abs() > _NEAR).sum())
