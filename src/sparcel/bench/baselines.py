"""Baselines: the engines' own calls, with which sparcel's are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparcel.bench import oracle
from sparcel.bench.engines import BenchEngine
from sparcel.bench.inputs import Case
from sparcel.comm import ring_bytes
from sparcel.stream import SparseStream

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
        expected = oracle.total([_signs(stream) for stream in case.streams])
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
    return _by_engine(engine, vectors[engine.comm.rank].values, oracle.total(vectors))


def _by_engine(engine: BenchEngine, source: Tensor, expected: oracle.Sum) -> Contender:
    """Return the engine's sum of dense tensors, in place, as in a program without sparcel."""
    tensor, ranks = torch.empty_like(source), engine.comm.size

    def run() -> Tensor:
        engine.all_reduce(tensor)
        return tensor

    return Contender(
        run,
        lambda result: oracle.count_wrong(result, expected),
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
        return oracle.count_wrong(found, case.total)

    entry_bytes = indices.itemsize + own.values.itemsize
    return Contender(run, wrong, reset, bytes=(case.ranks - 1) * case.k * entry_bytes)
