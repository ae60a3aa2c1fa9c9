"""The steps of each lossless sum, as its collective takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sparcel.cost.problem import Problem
from sparcel.cost.steps import EngineSum, Exchange, Step, Work
from sparcel.formats.header import HEADER_BYTES

DIRECT_RANKS, DIRECT_BYTES = 8, 256 << 10
"""Those of the collectives: what they gather without a pattern."""

ROUND = 12
"""Operations of a round beside those on its message."""

Schedule = Callable[[Problem], Iterator[Step]]


def dense(problem: Problem) -> Iterator[Step]:
    """Return the steps of `sparcel.collectives.dense`."""
    yield from gather(problem, HEADER_BYTES, entries=0)
    yield Work("fill", problem.size)
    yield Work("scatter", problem.k)
    yield EngineSum(problem.size * problem.itemsize, half=problem.itemsize == 2)


def allgather(problem: Problem) -> Iterator[Step]:
    """Return the steps of `sparcel.collectives.allgather`."""
    yield Work("encode", problem.message(problem.k))
    yield from gather(problem, problem.message(problem.k), entries=None)
    yield from merge_all(problem, problem.k, problem.size)


def recursive_doubling(problem: Problem) -> Iterator[Step]:
    """Return the steps of `sparcel.collectives.recursive_doubling`."""
    powers, extras = _powers(problem.ranks)
    if extras:
        yield from fold(problem)
    distance = 1
    while distance < powers:
        streams = distance + min(extras, distance)
        yield from swap(problem, problem.union(streams), problem.size, distance)
        yield from merge_two(problem, streams, problem.size)
        distance *= 2
    if extras:
        yield from unfold(problem)


def halving_doubling(problem: Problem) -> Iterator[Step]:
    """Return the steps of `sparcel.collectives.halving_doubling`."""
    powers, extras = _powers(problem.ranks)
    if extras:
        yield from fold(problem)
    streams, size, distance = 1.0 + (extras > 0), float(problem.size), powers // 2
    yield Work("split", problem.k)  # two parts in each round
    while distance:
        size /= 2
        part = problem.union(streams) * size / problem.size
        yield Work("small", ROUND)  # the halves are cut out first
        yield from swap(problem, part, size, distance)
        yield Work("decode", part)
        yield from merge_two(problem, streams, size)
        streams = min(2 * streams, problem.ranks)
        distance //= 2
    distance, total = 1, problem.union(problem.ranks)
    while distance < powers:
        yield from swap(problem, total * size / problem.size, size, distance)
        yield Work("decode", total * size / problem.size)
        size, distance = 2 * size, 2 * distance
    yield Work("join", total)  # two in each round
    if extras:
        yield from unfold(problem)


def split_allgather(problem: Problem) -> Iterator[Step]:
    """Return the steps of `sparcel.collectives.split_allgather`."""
    region = problem.size / problem.ranks
    most = problem.crowded_share(problem.ranks)
    yield from split(problem, problem.k * most)
    yield from merge_all(problem, problem.k * most, region)
    reduced = problem.union(problem.ranks)
    block = problem.message(reduced / problem.ranks, region)
    yield Work("encode", problem.message(reduced * most, region))
    largest = problem.message(reduced * most, region)
    bound = problem.message(problem.ranks * problem.k, region)
    yield from gather(problem, block, reduced / problem.ranks, largest, bound)
    yield Work("join", reduced)


def ring(problem: Problem) -> Iterator[Step]:
    """Return the steps of `sparcel.collectives.ring`."""
    ranks, region = problem.ranks, problem.size / problem.ranks
    yield Work("split", problem.k)
    for streams in range(1, ranks):
        part = problem.union(streams) / ranks
        yield from shift(problem, part, region)
        yield Work("merge", part + problem.k / ranks)
    for _ in range(1, ranks):
        yield from shift(problem, problem.union(ranks) / ranks, region)
    yield Work("join", problem.union(ranks))


def gather(
    problem: Problem,
    block: float,
    entries: float | None,
    largest: float = 0.0,
    at_most: float = 0.0,
    inside: bool = False,
) -> Iterator[Step]:
    """Return the gathering of every rank's block.

    Parameters
    ----------
    block, entries
        Bytes of a rank's message, and entries in it that are to be decoded, if it is.
    largest, at_most
        Bytes of the largest message, and the bound that its receivers know, where these are more.
    """
    ranks, largest = problem.ranks, max(largest, block)
    if 1 < ranks <= DIRECT_RANKS and max(largest, at_most) <= DIRECT_BYTES:
        yield Exchange("gather", largest, ranks - 1, inside=inside)
    else:
        yield from _bruck(problem, block, largest, inside)
    if entries is not None:
        yield Work("decode", entries, times=ranks)


def _bruck(problem: Problem, block: float, largest: float, inside: bool) -> Iterator[Step]:
    distance = 1
    while distance < problem.ranks:
        count = min(distance, problem.ranks - distance)
        nbytes = largest + (count - 1) * block
        yield Exchange("shift", nbytes, distance=distance, inside=inside)
        distance *= 2


def split(problem: Problem, entries: float) -> Iterator[Step]:
    """Return what sends every owner its slice, of ``entries`` for the owner that gets most."""
    if problem.ranks > 1:
        message = problem.message(entries, problem.size / problem.ranks)
        yield Work("split", problem.k)
        yield Work("encode", message, times=problem.ranks)
        yield Exchange("rotate", message, problem.ranks - 1)


def swap(problem: Problem, entries: float, size: float, distance: int) -> Iterator[Step]:
    """Return an exchange of streams between partners."""
    message = problem.message(entries, size)
    yield Work("small", ROUND)
    yield Work("encode", message)
    yield Exchange("pair", message, distance=distance)


def shift(problem: Problem, entries: float, size: float) -> Iterator[Step]:
    """Return an exchange of streams with the two neighbours."""
    message = problem.message(entries, size)
    yield Work("encode", message)
    yield Exchange("shift", message)
    yield Work("decode", 0 if problem.is_dense(entries, size) else entries)


def merge_two(problem: Problem, streams: float, size: float) -> Iterator[Step]:
    """Return the sum of two streams, each the sum of so many ranks', over ``size`` coordinates."""
    share = size / problem.size
    entries, result = problem.union(streams) * share, problem.union(2 * streams) * share
    if problem.is_dense(entries, size):
        yield Work("add", size)
        return
    yield Work("merge", 2 * entries)
    if problem.is_dense(result, size):
        yield Work("fill", size)
        yield Work("scatter", result)


def merge_all(problem: Problem, entries: float, size: float) -> Iterator[Step]:
    """Return the sum of all ranks' slices of so many entries, over ``size`` coordinates."""
    yield Work("merge.many", problem.ranks * entries)
    if problem.is_dense(problem.union(problem.ranks) * entries / problem.k, size):
        yield Work("fill", size)
        yield Work("scatter", problem.union(problem.ranks) * entries / problem.k)


def fold(problem: Problem) -> Iterator[Step]:
    """Return what takes the streams of the ranks beyond a power of two to the others."""
    powers, extras = _powers(problem.ranks)
    busy = extras / problem.ranks
    yield Work("encode", problem.message(problem.k), busy)
    yield Exchange("tree", problem.message(problem.k), distance=powers, sends=False)
    yield Work("merge", 2 * problem.k, busy)


def unfold(problem: Problem) -> Iterator[Step]:
    """Return what takes the result to the ranks beyond a power of two."""
    powers, extras = _powers(problem.ranks)
    message = problem.message(problem.union(problem.ranks))
    yield Work("encode", message, extras / problem.ranks)
    yield Exchange("tree", message, distance=powers, receives=False)


def _powers(ranks: int) -> tuple[int, int]:
    """Return the largest power of two up to ``ranks``, and how many ranks are beyond it."""
    powers: int = 1 << (ranks.bit_length() - 1)
    return powers, ranks - powers
