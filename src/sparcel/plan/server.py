"""A parameter server: all ranks send to one, which adds up and sends back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from sparcel.cost import Prediction, Problem, Rates, predict
from sparcel.stages import Exchange, Stage, Work, chosen, scattered


def through_server(method: str, rates: Rates) -> Callable[[Problem], Prediction]:
    """Return what predicts an exchange through a server whose link is like a rank's.

    Parameters
    ----------
    method
        ``"dense fp32"``, ``"dense bf16"``, ``"topk"`` (the server sends what all ranks selected) or
        ``"scalecom"`` (all send what one rank selected, which the server first tells them).
    """
    stages = partial(_stages, method)

    def predicted(problem: Problem) -> Prediction:
        found = predict(stages, problem, rates)
        return replace(found, bytes=round(max(messages(method, problem))))  # of a rank

    return predicted


def _stages(method: str, problem: Problem) -> Iterator[Stage]:
    """Yield the stages of a step; the server's link carries all messages, one after the other."""
    ranks, size = problem.ranks, problem.size
    for nbytes in messages(method, problem):
        yield Exchange("shift", (nbytes,) * ranks, distance=ranks)
    if method.startswith("dense"):
        yield Work("add", size, times=3)
        return
    busy = 1.0 if method == "topk" else 1 / ranks
    yield from (Work("select", size, busy), chosen(problem.k, busy))
    yield from (Work("add", size, times=2), scattered(ranks * problem.k))


def messages(method: str, problem: Problem) -> tuple[float, float]:
    """Return the bytes that a rank sends to the server, and that the server sends each rank."""
    if method.startswith("dense"):
        itemsize = 2 if method == "dense bf16" else problem.itemsize
        whole = problem.format.nbytes(None, problem.size, itemsize)
        return whole, whole
    if method == "topk":
        return problem.message(problem.k), problem.message(problem.entries(problem.everyone))
    indices = problem.format.exact.nbytes(problem.k, problem.size, 0)
    values = problem.format.nbytes(None, problem.k, problem.itemsize)
    return values + indices / problem.ranks, indices + values
