"""The rows of the table: for each a call to time, and a check of its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparcel import auto
from sparcel.bench import oracle
from sparcel.bench.baselines import (
    AS_MANY_BYTES,
    DENSE,
    SPARSE_COO,
    Contender,
    as_many_bytes,
    dense,
    sparse_coo,
)
from sparcel.bench.engines import BenchEngine
from sparcel.bench.inputs import Case
from sparcel.collectives import ALGORITHMS, gtopk, oktopk
from sparcel.errors import checked_name
from sparcel.formats import RAW, Format
from sparcel.schemes import ON_NODES, SCHEMES, SEND_ALL, Scheme, scheme
from sparcel.stream import SparseStream
from sparcel.wire import Wire

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
    on_nodes = ON_NODES if ranks_per_node > 1 else ()
    schemes = [name for name in SCHEMES if name not in ON_NODES or name in on_nodes]
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
            return oracle.count_wrong(total, _expected(name, case))
        # What came, and what all ranks lost and dropped, add up to all streams.
        balance = torch.zeros(own.size)
        for part in kept:
            balance += part.to_dense()
        engine.all_reduce(balance)
        balance += total.to_dense()
        balance[case.total.indices] -= case.total.values.to(balance.dtype)
        return int((balance.abs() > _NEAR).sum())

    return Contender(lambda: comm.run(job), wrong)


def _expected(name: str, case: Case) -> oracle.Sum:
    if name == "gtopk":
        return oracle.tree_largest(case.streams, case.k)
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
