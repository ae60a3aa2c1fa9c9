"""What a sum, or a step of training, costs: seconds, bytes and rounds, by its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sparcel.cost.defaults import default_rates
from sparcel.errors import InputError
from sparcel.rates import Curve, Rates
from sparcel.schedule import EngineSum, Exchange, Problem, Steps, Work

PHASES = {
    "select": "select",
    "topk": "select",
    "largest": "select",
    "histogram": "select",
    "without": "select",
    "encode": "encode",
    "decode": "encode",
    "merge": "reduce",
    "merge.many": "reduce",
    "split": "reduce",
    "join": "reduce",
    "small": "reduce",
    "scatter": "reduce",
    "fill": "reduce",
    "add": "reduce",
}
"""The phase that each kind of work counts to."""


@dataclass(frozen=True)
class Prediction:
    """What a sum or a step is expected to cost.

    Attributes
    ----------
    seconds
        Of the whole: the sum of the next four.
    select, encode, exchange, reduce
        Of it in each phase.
    bytes
        The larger of those sent and received, at the problem's rank.
    rounds
        Messages on the critical path.
    """

    seconds: float
    select: float
    encode: float
    exchange: float
    reduce: float
    bytes: int
    rounds: int


class Counts(NamedTuple):
    """Messages and bytes of one rank, as a communicator counts them, and rounds."""

    messages_sent: int
    bytes_sent: float
    messages_received: int
    bytes_received: float
    rounds: int


def count(steps: Steps, problem: Problem) -> Counts:
    """Return what the problem's rank sends and receives in these steps."""
    counted = []
    for step in steps(problem):
        if isinstance(step, Exchange):
            sends, receives = step.sends, step.receives
            traffic = (len(sends), sum(sends), len(receives), sum(receives), step.rounds)
            counted.append(Counts(*traffic))
        elif isinstance(step, EngineSum):
            rounds = step.rounds(problem.ranks)
            sent, received = step.traffic(problem.rank, problem.ranks)
            counted.append(Counts(rounds, sent, rounds, received, rounds))
    return Counts(*map(sum, zip(Counts(0, 0, 0, 0, 0), *counted, strict=True)))


def predict(steps: Steps, problem: Problem, rates: Rates | None = None) -> Prediction:
    """Return what an algorithm costs.

    Parameters
    ----------
    steps
        What it consists of, a table of `sparcel.collectives` or `sparcel.schemes` has them by name.
    rates
        None for the default ones.
    """
    rates = rates or default_rates()
    phases = dict.fromkeys(("select", "encode", "exchange", "reduce"), 0.0)
    for step in steps(problem):
        if isinstance(step, Exchange):
            phases["exchange"] += step.rounds * _message_seconds(step, problem, rates)
        elif isinstance(step, EngineSum):
            phases["exchange"] += _engine_seconds(step, problem, rates)
        else:
            phases[PHASES[step.kind]] += work_seconds(step, rates)
    traffic = count(steps, problem)
    volume = round(max(traffic.bytes_sent, traffic.bytes_received))
    return Prediction(sum(phases.values()), **phases, bytes=volume, rounds=traffic.rounds)


def choose(candidates: Mapping[str, Steps], problem: Problem, rates: Rates | None = None) -> str:
    """Return which of the candidates is predicted to be the fastest, the first of equals.

    It depends on nothing but the arguments, so that ranks with equal ones choose alike.
    """
    if not candidates:
        raise InputError("there must be a candidate to choose")
    return min(candidates, key=lambda name: predict(candidates[name], problem, rates).seconds)


def work_seconds(step: Work, rates: Rates) -> float:
    """Return how long work takes; the fewer ranks do it at once, the less they slow each other."""
    shared = max(1.0, rates.crowding * step.busy) / rates.crowding
    return step.times * rates[step.kind](step.amount) * shared


def _message_seconds(step: Exchange, problem: Problem, rates: Rates) -> float:
    """Return how long one message of an exchange takes."""
    between = rates[step.pattern]
    within: Curve = rates.curves.get(f"node.{step.pattern}", between)
    if step.inside:
        return within(step.nbytes)
    here = problem.ranks_per_node
    if step.pattern in ("rotate", "gather") or here == 1 or step.distance >= here:
        return between(step.nbytes)
    # Of a node's ranks so many have a peer elsewhere, and share the node's link.
    crossing = step.distance / here if step.pattern == "shift" else 0.0
    inner = within(step.nbytes)
    return max(inner, between(step.nbytes * crossing)) if crossing else inner


def _engine_seconds(step: EngineSum, problem: Problem, rates: Rates) -> float:
    """Return how long the engine's sum takes, on other ranks than were measured in proportion."""
    measured = rates["dense.bfloat16" if step.itemsize == 2 else "dense.float32"](step.nbytes)
    asked, had = problem.ranks, rates.ranks
    if asked == had or had == 1:
        return measured
    return measured * (asked - 1) / asked * had / (had - 1)
