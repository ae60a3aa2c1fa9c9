"""What is timed: each row of the table as something to call, and to check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparcel import collectives
from sparcel.bench import oracle
from sparcel.bench.engines import Engine
from sparcel.bench.inputs import Case
from sparcel.collectives import ALGORITHMS, gtopk, oktopk
from sparcel.errors import known
from sparcel.schemes import SCHEMES, Hierarchical, Scheme, scheme
from sparcel.stream import SparseStream

DENSE = {"dense fp32": torch.float32, "dense bf16": torch.bfloat16}
"""Baselines that no density matters to."""

AS_MANY_BYTES = "dense 2k"
"""The engine's all-reduce of as many bytes as a stream has: of 2k float32."""

SPARSE_COO = "sparse_coo"
EXCHANGES = ("gtopk", "oktopk")
STEP = "step:"

_ON_NODES = ("hitopk", "torus2d")


@dataclass
class Contender:
    """One row: ``run`` is timed, ``reset`` goes ahead of it and is not.

    Attributes
    ----------
    wrong
        How many coordinates of what ``run`` returned are not what they should be.
    bytes
        What a rank sends or receives, for the engine's own calls, which do not count.
    """

    run: Callable[[], Any]
    wrong: Callable[[Any], int]
    reset: Callable[[], object] = lambda: None
    bytes: int | None = None


def names(asked: str, whole_step: bool, ranks_per_node: int) -> list[str]:
    """Return the rows that ``asked`` means, "all" or names separated by commas; baselines first.

    With ``whole_step`` a scheme's name means its step too.

    Raises
    ------
    InputError
        For a name that does not exist.
    """
    on_nodes = _ON_NODES if ranks_per_node > 1 else ()
    schemes = [name for name in SCHEMES if name not in _ON_NODES or name in on_nodes]
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


def contender(name: str, case: Case, engine: Engine, ranks_per_node: int) -> Contender | None:
    """Return the row ``name`` of a case, or None where the engine has no such thing."""
    if name in DENSE:
        return _dense(case, engine, DENSE[name])
    if name == AS_MANY_BYTES:
        return _as_many_bytes(case, engine)
    if name == SPARSE_COO:
        return _sparse_coo(case, engine) if engine.name == "gloo" else None
    if name.startswith(STEP):
        return _step(name.removeprefix(STEP), case, engine, ranks_per_node)
    comm, k = engine.comm, case.k
    own = case.streams[comm.rank]
    if name == "gtopk":
        return Contender(
            lambda: comm.run(lambda: gtopk(own, comm, k)).total,
            lambda result: oracle.count_wrong(result, oracle.tree_largest(case.streams, k)),
        )
    if name == "oktopk":
        return Contender(
            lambda: comm.run(lambda: oktopk(own, comm, k, k)),
            lambda result: oracle.count_wrong(result, case.total.largest(k)),
        )
    return Contender(
        lambda: comm.run(lambda: collectives.all_reduce(own, comm, algorithm=name, max_nnz=k)),
        lambda result: oracle.count_wrong(result, case.total),
    )


def _dense(case: Case, engine: Engine, dtype: torch.dtype) -> Contender | None:
    """Sum whole vectors by the engine alone."""
    if dtype not in engine.dtypes:
        return None
    source = case.streams[engine.comm.rank].to_dense()
    expected = case.total
    if dtype != torch.float32:  # sums of signs are whole numbers that half precision holds
        source.sign_()
        expected = oracle.total([_signs(stream) for stream in case.streams])
    return _by_engine(engine, source.to(dtype), expected)


def _signs(stream: SparseStream) -> SparseStream:
    return SparseStream.unchecked(stream.indices, stream.values.sign(), stream.size)


def _as_many_bytes(case: Case, engine: Engine) -> Contender:
    def vector(rank: int) -> SparseStream:
        values = torch.zeros(2 * case.k)  # the stream of a real gradient may have fewer than k
        values[: case.streams[rank].nnz] = case.streams[rank].values
        return SparseStream.unchecked(None, values, 2 * case.k)

    vectors = [vector(rank) for rank in range(case.ranks)]
    return _by_engine(engine, vectors[engine.comm.rank].values, oracle.total(vectors))


def _by_engine(engine: Engine, source: Tensor, expected: oracle.Sum) -> Contender:
    """Sum dense tensors, in place, as a program without sparcel does."""
    tensor, ranks = torch.empty_like(source), engine.comm.size

    def run() -> Tensor:
        engine.all_reduce(tensor)
        return tensor

    return Contender(
        run,
        lambda result: oracle.count_wrong(result, expected),
        reset=lambda: tensor.copy_(source),
        bytes=2 * (ranks - 1) * source.nbytes // ranks,
    )


def _sparse_coo(case: Case, engine: Engine) -> Contender:
    """Sum sparse COO tensors by Gloo's own sparse all-reduce, which gathers all of them."""
    own = case.streams[engine.comm.rank]
    assert own.indices is not None, "selections are sparse"
    indices = own.indices.long()[None]
    held: list[Tensor] = []

    def reset() -> None:
        # It replaces the tensor's parts by those of the sum.
        parts = (indices, own.values, (case.size,))
        held[:] = [torch.sparse_coo_tensor(*parts, check_invariants=False, is_coalesced=True)]

    def run() -> Tensor:
        engine.all_reduce(held[0])
        return held[0]

    def wrong(result: Tensor) -> int:
        sums = result.coalesce()
        found = SparseStream(sums.indices()[0], sums.values(), case.size)
        return oracle.count_wrong(found, case.total)

    entry_bytes = indices.itemsize + own.values.itemsize
    return Contender(run, wrong, reset, bytes=(case.ranks - 1) * case.k * entry_bytes)


def _step(name: str, case: Case, engine: Engine, ranks_per_node: int) -> Contender:
    """Take a whole step: accumulate, select, exchange, and update the parameters.

    Every iteration begins with an empty memory, so that what is selected keeps its distribution.
    """
    comm = engine.comm
    settings: dict[str, Any] = {} if name in ("dense", "torus2d") else {"density": case.density}
    if name in _ON_NODES:
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


def _lost(made: Scheme, gradient: Tensor, update: Tensor, engine: Engine) -> int:
    """Count the coordinates where update and memories do not add up to the gradients.

    Ranks that hold different updates find different counts. All values are whole numbers.
    """
    balance = gradient.clone()
    if (owed := made.owed) is not None:
        balance -= owed
    engine.all_reduce(balance)
    # Rounded, for the average is the sum divided by a number that need not be a power of two.
    return int((balance - (update * engine.comm.size).round_()).count_nonzero())
