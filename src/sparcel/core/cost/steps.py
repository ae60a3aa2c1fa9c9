"""What a step of training costs by each scheme, and by what a plan compares them with: formulas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import ceil

from sparcel.core.collectives.all_reduce import SLICE
from sparcel.core.cost.formulas import (
    Terms,
    agreement,
    allgather,
    chosen,
    copied,
    down_tree,
    fastest_sum,
    gather,
    gtopk,
    halving_doubling,
    oktopk,
    scattered,
)
from sparcel.core.cost.predict import EngineSum, Exchange, Fastest, Formula, Problem, Work
from sparcel.core.formats import RAW, Format
from sparcel.core.regions import RETURNED, compiled_bits

STEP = Work("small", 250)
"""A step's small operations, besides those on its vectors: checks, layers, the transaction."""

_BY_REGIONS = Work("small", 50)
"""Small operations of a step by regions, besides those on its vectors."""

_ENTERING, _DELIVERING = 2.0, 1.0
"""The time to make messages of a vector, and to read them, in selections from the vector."""

_BY_TORCH = 2.5
"""How many times as long it takes in formats that compiled passes do not know."""


def ahead(size: int) -> Work:
    """Return the work of step-ahead on parameters of ``size`` coordinates.

    It is that of three passes over them with Adam. SGD takes two, which is not told apart.
    """
    return Work("add", size, times=3)


def engine_sum(itemsize: int) -> Formula:
    """Return the formula of the engine's all-reduce alone; ``itemsize`` is the bytes of a value.

    DDP without sparcel does nothing else.
    """
    return lambda p: [EngineSum(p.size, itemsize, p.ranks)]


def _selected(p: Problem) -> Terms:
    """Yield how the gradient is added to the memory, and the k largest are taken out."""
    yield STEP
    yield Work("select", p.size)
    yield chosen(p.k)


def _applied(p: Problem, entries: float) -> Terms:
    """Yield how an average of so many coordinates is written, and the update applied."""
    yield Work("add", p.size)
    if not p.lengths.is_dense(entries):
        yield scattered(entries)
    yield Work("add", p.size)


def dense_step(p: Problem) -> Terms:
    """`dense`, of the gradient."""
    yield from agreement(p)
    yield Work("add", p.size)
    yield EngineSum(p.size, p.itemsize, p.ranks)
    yield from _applied(p, p.size)


def by_regions(p: Problem, returned: float) -> Terms:
    """(P − 1)/P of k up, and of what the owners return down: two exchanges, whatever P."""
    region = p.size / p.ranks

    def message(entries: float, format: Format) -> float:
        dense = entries >= format.dense_from(p.size, p.itemsize)
        return format.nbytes(None if dense else entries / p.ranks, region, p.itemsize)

    up, down = message(p.k, p.format), message(returned, p.answer or p.format)
    compiled, _ = compiled_bits(p.format, p.lengths.is_dense(p.k))
    slower = 1.0 if compiled else _BY_TORCH
    yield _BY_REGIONS
    yield Work("select", p.size, times=slower * _ENTERING)
    if p.ranks > 1:
        yield Exchange("rotate", up, up, p.ranks - 1)
        yield Work("select", region, times=slower * p.ranks)
        yield Exchange("rotate", down, down, p.ranks - 1)
    yield Work("select", p.size, times=slower * _DELIVERING)


def bidirectional(p: Problem) -> Terms:
    """`by_regions` with the default ``returned``."""
    return by_regions(p, min(p.size, round(RETURNED * p.k)))


def topk_step(p: Problem) -> Terms:
    """Yield the fastest sum of the ranks' selections."""
    yield from _selected(p)
    yield from fastest_sum(p)
    yield from _applied(p, p.union(p.ranks))


def _winners_step(exchange: Formula, p: Problem) -> Terms:
    """`gtopk` or `oktopk` of the ranks' selections."""
    yield from _selected(p)
    yield from exchange(p)
    yield scattered(p.k)
    yield from _applied(p, p.k)


def scalecom(p: Problem) -> Terms:
    """2k(P − 1)/P of the leader's indices, then 2k(P − 1)/P of values at these."""
    yield Work("add", p.size, times=3)  # fitted to measured steps
    yield Work("select", p.size, 1 / p.ranks)  # by the leader
    yield chosen(p.k, 1 / p.ranks)
    yield STEP
    indices = p.format.exact.nbytes(p.k, p.size, 0)
    yield Work("encode", indices, 1 / p.ranks)
    yield from down_tree(p.ranks, indices)
    yield copied(p.k)
    yield scattered(2 * p.k)
    yield from halving_doubling(replace(p, size=p.k, spread=p.k))
    yield from _applied(p, p.k)


def on_nodes(inner: Formula, is_dense: bool, p: Problem) -> Terms:
    """Yield sums inside of nodes, ``inner`` of a shard across them, and a gather inside.

    ``is_dense`` tells that the sum of ``inner`` is dense.
    """
    here = min(p.ranks_per_node, p.ranks)
    shard, nodes = ceil(p.size / here), max(1, p.ranks // here)
    inside = replace(p, format=RAW)  # only what crosses nodes travels in the format
    if is_dense:
        yield from agreement(p)
    yield from _summed_inside(inside, here, shard)
    across = Problem(
        shard,
        min(shard, ceil(p.k / here)),
        nodes,
        itemsize=max(4, p.itemsize),  # half precision has become a float32 sum
        format=p.format,
        answer=p.answer,
    )
    yield from inner(across)
    total = shard if is_dense else across.union(nodes)
    if here > 1:
        lengths = inside.lengths
        block = lengths.region_message(total, shard)
        yield from gather(here, block, lengths.most_bytes(None, shard), inside=True)
        yield copied(total, times=here)
        yield Work("encode", lengths.message(total * here))
    yield from _applied(inside, p.size if is_dense else total * here)


def _summed_inside(p: Problem, here: int, shard: int) -> Terms:
    """Yield the reduce-scatter inside of a node, slice by slice."""
    if here > 1:
        slices = ceil(shard / SLICE)
        each, messages = shard / slices, slices * (here - 1)
        nbytes = p.format.nbytes(None, each, p.itemsize)
        yield Work("encode", (here - 1) * each * p.itemsize, times=slices)
        yield Exchange("rotate", nbytes, nbytes, messages, inside=True)
        yield Work("add", each, times=messages)


def _hitopk_across(p: Problem) -> Terms:
    yield from _selected(p)
    yield from allgather(p)


# Methods that a plan compares with.


def powersgd(parameters: int, p: Problem) -> Terms:
    """Yield the sums of left factors, and then of right ones, of torch's PowerSGD hook.

    The matrices of a model with so many parameters are taken to be square, with sides of twice the
    cube root of the parameters. So it sends 25 % more than GPT-2's shapes ask for, and 5 % more
    than those of ResNet-50 and GPT-2 XL. Its products, its error feedback and its copies take about
    as long as on an H100, the host's time included (docs/how-to/gpu.md), and on a core of a CPU.
    """
    rank, side = 4, 2 * parameters ** (1 / 3)
    yield Work("add", p.size, times=30)
    for _ in range(2):
        yield EngineSum(ceil(rank * p.size / side), 4, p.ranks)


def _served(p: Problem, *messages: tuple[float, float]) -> Iterator[Exchange]:
    """Yield messages of each rank to a server, and of the server to each rank.

    As in ScaleCom's appendix F, each rank has a link to the server for itself, or with the other
    ranks of its machine, and the server adds up while messages arrive, which takes no time.
    """
    for up, down in messages:
        yield Exchange("shift", up, None, 1, p.ranks)
        yield Exchange("shift", None, down, 1, p.ranks)


def _served_selection(p: Problem, busy: float) -> Terms:
    """Yield the work of selecting, and of passes over memory and update, on the rank."""
    yield Work("select", p.size, busy)
    yield chosen(p.k, busy)
    yield Work("add", p.size, times=2)


def _served_dense(itemsize: int, p: Problem) -> Terms:
    whole = p.format.nbytes(None, p.size, itemsize)
    yield from _served(p, (whole, whole))


def _served_topk(p: Problem) -> Terms:
    """Yield what each rank selects; back comes what any of them did."""
    yield from _served_selection(p, 1.0)
    yield from _served(p, (p.message(1), p.message(p.ranks)))
    yield scattered(p.union(p.ranks))


def _served_scalecom(p: Problem) -> Terms:
    """Yield what one rank selects, whose indices go ahead of all values."""
    indices = p.format.exact.nbytes(p.k, p.size, 0)
    values = p.format.nbytes(None, p.k, p.itemsize)
    yield from _served_selection(p, 1 / p.ranks)
    yield from _served(p, (indices, indices), (values, values))
    yield scattered(p.k)


AUTO: Mapping[str, Formula] = {
    "dense": dense_step,
    "topk": topk_step,
    "gtopk": partial(_winners_step, gtopk),
    "oktopk": partial(_winners_step, oktopk),
}
"""Of steps of the methods that the scheme `auto` chooses among, by name."""

STEPS: Mapping[str, Formula] = {
    "bidirectional": bidirectional,
    **AUTO,
    "auto": lambda _: [Fastest(AUTO)],
    "scalecom": scalecom,
    "hitopk": partial(on_nodes, _hitopk_across, False),
    "torus2d": partial(on_nodes, engine_sum(4), True),
    "sparcml": topk_step,  # without bits
}
"""Of steps of the schemes, by name."""

SERVED: Mapping[str, Formula] = {
    "dense fp32": partial(_served_dense, 4),
    "dense bf16": partial(_served_dense, 2),
    "topk": _served_topk,
    "scalecom": _served_scalecom,
}
"""Of steps through a parameter server, by name."""
