"""A parameter server: all ranks send to one, which adds up and sends back.

As in ScaleCom's appendix F, each rank has a link to the server for itself, or with the other ranks
of its machine, and the server adds up while messages arrive, which takes no time of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sparcel.cost import Problem
from sparcel.stages import Exchange, Stage, Stages, Work, chosen, scattered


def _dense(itemsize: int, problem: Problem) -> Iterator[Stage]:
    """Yield the stages of a sum of whole vectors, of ``itemsize`` bytes a value."""
    whole = problem.format.nbytes(None, problem.size, itemsize)
    yield from _there_and_back(problem, whole, whole)


def _topk(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of a sum of what each rank selects; back comes what any of them did."""
    entries = problem.entries(problem.everyone)
    yield from _selected(problem, 1.0)
    yield from _there_and_back(problem, problem.message(problem.k), problem.message(entries))
    yield scattered(entries)


def _scalecom(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of a sum of what one rank selects, whose indices go ahead of all values."""
    indices = problem.format.exact.nbytes(problem.k, problem.size, 0)
    values = problem.format.nbytes(None, problem.k, problem.itemsize)
    yield from _selected(problem, 1 / problem.ranks)
    yield from _there_and_back(problem, indices, indices)
    yield from _there_and_back(problem, values, values)
    yield scattered(problem.k)


def _selected(problem: Problem, busy: float) -> Iterator[Stage]:
    """Yield the work of selecting, and of passes over memory and update, on the rank."""
    yield Work("select", problem.size, busy)
    yield chosen(problem.k, busy)
    yield Work("add", problem.size, times=2)


def _there_and_back(problem: Problem, up: float, down: float) -> Iterator[Exchange]:
    """Yield a message of each rank to the server, and one of the server to each rank."""
    yield Exchange("shift", sends=(up,), distance=problem.ranks)
    yield Exchange("shift", receives=(down,), distance=problem.ranks)


SERVED: dict[str, Stages] = {
    "dense fp32": partial(_dense, 4),
    "dense bf16": partial(_dense, 2),
    "topk": _topk,
    "scalecom": _scalecom,
}
"""Methods by name, as `sparcel.plan` lists them."""
