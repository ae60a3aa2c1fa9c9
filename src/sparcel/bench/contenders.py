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
from sparcel.errors import known
from sparcel.schemes import ON_NODES, SCHEMES, SEND_ALL, Hierarchical, Scheme, scheme
from sparcel.wire import Wire

EXCHANGES = ("gtopk", "oktopk")
STEP = "step:"


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
            chosen.append(known(name, [*every, *steps], "algorithm"))
        if whole_step and step in steps:
            chosen.append(step)
    return sorted(dict.fromkeys(chosen), key=lambda name: name not in DENSE)


def contender(name: str, case: Case, engine: BenchEngine, ranks_per_node: int) -> Contender | None:
    """Return the row ``name`` of a case, or None if the engine does not support it."""
    if name in DENSE:
        return dense(case, engine, DENSE[name])
    if name == AS_MANY_BYTES:
        return as_many_bytes(case, engine)
    if name == SPARSE_COO:
        return sparse_coo(case, engine) if engine.name == "gloo" else None
    if name.startswith(STEP):
        return _step(name.removeprefix(STEP), case, engine, ranks_per_node)
    comm, k = engine.comm, case.k
    own = case.streams[comm.rank]
    if name == "gtopk":
        return Contender(
            lambda: comm.run(lambda: gtopk(own, Wire(comm), k)).total,
            lambda result: oracle.count_wrong(result, oracle.tree_largest(case.streams, k)),
        )
    if name == "oktopk":
        return Contender(
            lambda: comm.run(lambda: oktopk(own, Wire(comm), k, k)).total,
            lambda result: oracle.count_wrong(result, case.total.largest(k)),
        )
    return Contender(
        lambda: comm.run(lambda: auto.all_reduce(own, Wire(comm), algorithm=name, max_nnz=k)),
        lambda result: oracle.count_wrong(result, case.total),
    )


def _step(name: str, case: Case, engine: BenchEngine, ranks_per_node: int) -> Contender:
    """Return a whole step: accumulate, select, exchange, and update the parameters.

    Every iteration begins with an empty memory, so that selections keep their distribution.
    """
    comm = engine.comm
    settings: dict[str, Any] = {} if name in SEND_ALL else {"density": case.density}
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
        reset=lambda: _forget(made),
    )


def _forget(made: Scheme) -> None:
    inner = made.inner if isinstance(made, Hierarchical) else made
    for remembered in inner.coordinates().values():
        remembered.zero_()


def _lost(made: Scheme, gradient: Tensor, update: Tensor, engine: BenchEngine) -> int:
    """Count the coordinates at which update and memories do not add up to the gradients.

    Each rank checks its own update. All values are whole numbers.
    """
    balance = gradient.clone()
    if (owed := made.owed) is not None:
        balance -= owed
    engine.all_reduce(balance)
    # Round, because the average is inexact if the number of ranks is no power of two.
    return int((balance - (update * engine.comm.size).round_()).count_nonzero())
