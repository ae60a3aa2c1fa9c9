"""The steps of the schemes: select, exchange, and write the update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import ceil

from sparcel.cost.problem import Problem
from sparcel.cost.schedule import Schedule, allgather, gather, halving_doubling, split_allgather
from sparcel.cost.steps import EngineSum, Exchange, Step, Work
from sparcel.cost.topk_schedule import gtopk, oktopk
from sparcel.formats.header import HEADER_BYTES

_SMALL = 250
"""Operations of a step beside those on its vectors: checks, layers, the transaction."""

_BUCKET = 512
"""Of so many consecutive coordinates SparCML's selector takes the largest."""


def engine(problem: Problem, half: bool = False) -> Iterator[Step]:
    """Return the engine's dense all-reduce of the vector, and nothing else."""
    yield EngineSum(problem.size * (2 if half else problem.itemsize), half)


def dense_step(problem: Problem) -> Iterator[Step]:
    """Return a step without compression."""
    yield from gather(problem, HEADER_BYTES, entries=0)
    yield Work("add", problem.size)
    yield from engine(problem)
    yield from _dense_update(problem)


def sparse_step(exchange: Schedule, problem: Problem) -> Iterator[Step]:
    """Return a step whose update has as many coordinates as the ranks' streams together."""
    yield from _select(problem)
    yield from exchange(problem)
    total = problem.union(problem.ranks)
    if problem.is_dense(total):
        yield from _dense_update(problem)
    else:
        yield from _sparse_update(problem, total)


def sparcml_step(problem: Problem) -> Iterator[Step]:
    """Return a step of `sparcel.scheme("sparcml")`, which selects one of 512 at the least."""
    buckets = ceil(problem.size / _BUCKET)
    k = min(problem.size, buckets * max(1, round(_BUCKET * problem.k / problem.size)))
    spread = None if problem.spread is None else max(k, problem.spread)
    yield from sparse_step(split_allgather, replace(problem, k=k, spread=spread))


def gtopk_step(problem: Problem) -> Iterator[Step]:
    """Return a step of `sparcel.scheme("gtopk")`."""
    yield from _select(problem)
    yield from gtopk(problem)
    yield Work("scatter", problem.k)
    yield from _sparse_update(problem, problem.k)


def oktopk_step(problem: Problem) -> Iterator[Step]:
    """Return a step of `sparcel.scheme("oktopk")`."""
    yield from _select(problem)
    yield from oktopk(problem)
    yield Work("without", problem.k)
    yield Work("scatter", problem.k)
    yield from _sparse_update(problem, problem.k)


def scalecom_step(problem: Problem) -> Iterator[Step]:
    """Return a step of `sparcel.scheme("scalecom")`."""
    yield Work("add", problem.size, times=3)  # copied, added to, and looked through
    yield Work("largest", problem.k, 1 / problem.ranks)
    yield Work("small", _SMALL)
    rounds, index_bytes = (problem.ranks - 1).bit_length(), problem.entry_bytes - problem.itemsize
    for level in range(rounds):
        message = HEADER_BYTES + problem.k * index_bytes / 2 ** (level + 1)
        yield Exchange("tree", message, distance=1 << rounds - level - 1, receives=False)
    block = 2 * HEADER_BYTES + problem.k * index_bytes / problem.ranks
    yield from gather(problem, block, problem.k / problem.ranks)
    yield Work("scatter", 2 * problem.k)
    values = replace(problem, size=problem.k, spread=problem.k, clusters=0)
    yield from halving_doubling(values)
    yield from _sparse_update(problem, problem.k)


def on_nodes_step(inner: Schedule, problem: Problem) -> Iterator[Step]:
    """Return a step on two levels: dense sums inside a node, ``inner`` across, on the shards."""
    here = min(problem.ranks_per_node, problem.ranks)
    nodes = max(1, problem.ranks // here)
    shard = ceil(problem.size / here)
    if here > 1:
        yield Work("encode", problem.size * problem.itemsize)
        yield Exchange("rotate", HEADER_BYTES + shard * problem.itemsize, here - 1, inside=True)
        for _ in range(1, here):
            yield Work("add", shard)
    k = max(1, min(shard, ceil(problem.k / here)))
    across = Problem(shard, k, nodes, 1, problem.itemsize)
    yield from inner(across)
    total = across.union(nodes) if inner is _shard_topk else shard
    if here > 1:
        members = replace(problem, ranks=here)
        yield from gather(members, across.message(total), total, inside=True)
        yield Work("encode", problem.message(total * here))
    if problem.is_dense(total * here):
        yield from _dense_update(problem)
    else:
        yield from _sparse_update(problem, total * here)


def _shard_topk(problem: Problem) -> Iterator[Step]:
    """Return HiTopKComm's exchange across nodes."""
    yield from _select(problem)
    yield from allgather(problem)


def _select(problem: Problem) -> Iterator[Step]:
    """Return what adds the gradient to the memory and takes the k largest out."""
    yield Work("small", _SMALL)
    yield Work("select", problem.size)
    yield Work("largest", problem.k)


def _sparse_update(problem: Problem, entries: float) -> Iterator[Step]:
    """Return what writes a sparse average into the update, and subtracts that."""
    yield Work("fill", problem.size)
    yield Work("scatter", entries)
    yield Work("add", problem.size)


def _dense_update(problem: Problem) -> Iterator[Step]:
    """Return what divides a dense sum, and subtracts the update."""
    yield Work("add", problem.size)
    yield Work("add", problem.size)


hitopk_step = partial(on_nodes_step, _shard_topk)
torus2d_step = partial(on_nodes_step, engine)
