"""A parameter server: all ranks send to one, which adds up and sends back."""

from __future__ import annotations

from collections.abc import Callable

from sparcel.cost import Prediction, Problem, Rates, work_seconds
from sparcel.stages import Work, chosen, scattered


def through_server(method: str, rates: Rates) -> Callable[[Problem], Prediction]:
    """Return what predicts an exchange through a server whose link is like a rank's.

    Parameters
    ----------
    method
        ``"dense fp32"``, ``"dense bf16"``, ``"topk"`` (the server sends what all ranks selected) or
        ``"scalecom"`` (all send what one rank selected, which the server first tells them).
    """

    def predicted(problem: Problem) -> Prediction:
        up, down = messages(method, problem)
        ranks, size, link = problem.ranks, problem.size, rates["shift"]
        # The server's link carries the messages of all ranks, one after the other.
        exchange = ranks * (link(up) + link(down))
        selecting, reducing = [], [Work("add", size, times=3)]
        if method in ("topk", "scalecom"):
            busy = 1.0 if method == "topk" else 1 / ranks
            selecting = [Work("select", size, busy), chosen(problem.k, busy)]
            reducing = [Work("add", size, times=2), scattered(ranks * problem.k)]
        select, reduce = (
            sum(work_seconds(work, rates) for work in works) for works in (selecting, reducing)
        )
        return Prediction(
            exchange + select + reduce,
            select=select,
            encode=0.0,
            exchange=exchange,
            reduce=reduce,
            bytes=round(max(up, down)),
            rounds=2 * ranks,
        )

    return predicted


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
