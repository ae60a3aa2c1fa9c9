"""The engines' own calls, beside which sparcel's stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparcel.bench import oracle
from sparcel.bench.engines import BenchEngine
from sparcel.bench.inputs import Case
from sparcel.stream import SparseStream

DENSE = {"dense fp32": torch.float32, "dense bf16": torch.bfloat16}
"""Baselines that no density matters to."""

AS_MANY_BYTES = "dense 2k"
"""The engine's all-reduce of as many bytes as a stream has: of 2k float32."""

SPARSE_COO = "sparse_coo"


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


def dense(case: Case, engine: BenchEngine, dtype: torch.dtype) -> Contender | None:
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


def as_many_bytes(case: Case, engine: BenchEngine) -> Contender:
    """Sum short dense vectors by the engine alone."""

    def vector(rank: int) -> SparseStream:
        values = torch.zeros(2 * case.k)  # the stream of a real gradient may have fewer than k
        values[: case.streams[rank].nnz] = case.streams[rank].values
        return SparseStream.unchecked(None, values, 2 * case.k)

    vectors = [vector(rank) for rank in range(case.ranks)]
    return _by_engine(engine, vectors[engine.comm.rank].values, oracle.total(vectors))


def _by_engine(engine: BenchEngine, source: Tensor, expected: oracle.Sum) -> Contender:
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


def sparse_coo(case: Case, engine: BenchEngine) -> Contender:
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
