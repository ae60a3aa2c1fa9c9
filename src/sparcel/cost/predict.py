"""The cost of an all-reduce or a training step: seconds, bytes and rounds, from its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from sparcel._checks import check_callable, check_type
from sparcel.cost.defaults import default_rates
from sparcel.cost.work import KINDS
from sparcel.errors import InputError
from sparcel.rates import Curve, Rates
from sparcel.steps import EngineSum, Exchange, Problem, Step, Steps, Work


@dataclass(frozen=True)
class Prediction:
    """The expected cost of an all-reduce or a training step.

    Attributes
    ----------
    seconds
        Total time: the sum of the next four.
    select, encode, exchange, reduce
        Seconds in each phase.
    bytes
        The larger of the bytes sent and the bytes received by the problem's rank.
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
    """Messages and bytes of one rank, counted as a communicator counts them, and rounds."""

    messages_sent: int
    bytes_sent: float
    messages_received: int
    bytes_received: float
    rounds: int


def count(steps: Steps, problem: Problem) -> Counts:
    """Return the messages, bytes and rounds of the problem's rank in these steps."""
    counted = []
    for step in _listed(steps, problem):
        if isinstance(step, Exchange):
            sends, receives = step.sends, step.receives
            traffic = (len(sends), sum(sends), len(receives), sum(receives), step.rounds)
            counted.append(Counts(*traffic))
        elif isinstance(step, EngineSum):
            rounds = step.rounds
            counted.append(Counts(rounds, step.sent, rounds, step.received, rounds))
    return Counts(*map(sum, zip(Counts(0, 0, 0, 0, 0), *counted, strict=True)))


@lru_cache(maxsize=64)
def _listed(steps: Steps, problem: Problem) -> tuple[Step, ...]:
    """List the steps once for all rates; a plan asks again for many bandwidths."""
    return tuple(steps(problem))


def predict(steps: Steps, problem: Problem, rates: Rates | None = None) -> Prediction:
    """Return the predicted cost of an algorithm.

    Parameters
    ----------
    steps
        The algorithm's steps, from a table of `sparcel.collectives` or `sparcel.schemes`.
    rates
        None for `default_rates`.
    """
    check_callable(steps, "steps")
    check_type(problem, Problem, "problem")
    rates = default_rates() if rates is None else rates
    check_type(rates, Rates, "rates")
    phases = dict.fromkeys(("select", "encode", "exchange", "reduce"), 0.0)
    for step in _listed(steps, problem):
        if isinstance(step, Exchange):
            phases["exchange"] += step.rounds * _message_seconds(step, problem, rates)
        elif isinstance(step, EngineSum):
            phases["exchange"] += _engine_seconds(step, problem, rates)
        else:
            phases[KINDS[step.kind].phase] += work_seconds(step, rates)
    traffic = count(steps, problem)
    volume = round(max(traffic.bytes_sent, traffic.bytes_received))
    return Prediction(sum(phases.values()), **phases, bytes=volume, rounds=traffic.rounds)


def choose(candidates: Mapping[str, Steps], problem: Problem, rates: Rates | None = None) -> str:
    """Return the candidate that is predicted to be the fastest; of equal ones, the first.

    Only the arguments decide, so ranks with equal arguments make the same choice.
    """
    if not candidates:
        raise InputError("choose needs at least one candidate, got none")
    return min(candidates, key=lambda name: predict(candidates[name], problem, rates).seconds)


def work_seconds(step: Work, rates: Rates) -> float:
    """Return the seconds of work; ranks slow each other less if fewer of them work at once."""
    shared = max(1.0, rates.crowding * step.busy) / rates.crowding
    return step.times * rates[step.kind](step.amount) * shared


def _message_seconds(step: Exchange, problem: Problem, rates: Rates) -> float:
    """Return the seconds of one message of an exchange."""
    between = rates[step.pattern]
    # A gather inside a node is not measured; a rotation sends as many messages.
    inner_pattern = "rotate" if step.pattern == "gather" else step.pattern
    within: Curve = rates.curves.get(f"node.{inner_pattern}", between)
    if step.inside:
        return within(step.nbytes)
    here = problem.ranks_per_node
    if step.pattern in ("rotate", "gather") or here == 1 or step.distance >= here:
        return between(step.nbytes)
    # This many of a node's ranks have a peer on another node, and share the node's link.
    crossing = step.distance / here if step.pattern == "shift" else 0.0
    inner = within(step.nbytes)
    return max(inner, between(step.nbytes * crossing)) if crossing else inner


def _engine_seconds(step: EngineSum, problem: Problem, rates: Rates) -> float:
    """Return the seconds of the engine's sum, scaled from the measured to this number of ranks.

    Where it is a sum of one rank of each node, the nodes' other ranks sum at the same time. The
    links then carry as much as one sum of all their bytes.
    """
    curve = rates["dense.bfloat16" if step.itemsize == 2 else "dense.float32"]
    sums = min(problem.ranks_per_node, problem.ranks // step.ranks)
    measured, asked, had = curve(sums * step.nbytes), step.ranks, rates.ranks
    if asked == had or had == 1:
        return measured
    return measured * (asked - 1) / asked * had / (had - 1)
