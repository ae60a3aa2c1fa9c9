"""The cost of an all-reduce or a training step: seconds, bytes and rounds, from its stages."""

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
from sparcel.stages import EngineSum, Exchange, Problem, Stage, Stages, Work


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


def count(stages: Stages, problem: Problem) -> Counts:
    """Return the messages, bytes and rounds of the problem's rank in these stages."""
    counted = []
    for stage in _listed(stages, problem):
        if isinstance(stage, Exchange):
            sends, receives = stage.sends, stage.receives
            traffic = (len(sends), sum(sends), len(receives), sum(receives), stage.rounds)
            counted.append(Counts(*traffic))
        elif isinstance(stage, EngineSum):
            rounds = stage.rounds
            counted.append(Counts(rounds, stage.sent, rounds, stage.received, rounds))
    return Counts(*map(sum, zip(Counts(0, 0, 0, 0, 0), *counted, strict=True)))


@lru_cache(maxsize=512)
def _listed(stages: Stages, problem: Problem) -> tuple[Stage, ...]:
    """List the stages once for all rates; a plan asks again for many bandwidths."""
    return tuple(stages(problem))


def predict(stages: Stages, problem: Problem, rates: Rates | None = None) -> Prediction:
    """Return the predicted cost of an algorithm.

    Parameters
    ----------
    stages
        The algorithm's stages: ``sparcel.schemes.stages_of(name, rates)``, or those of an
        entry of ``sparcel.collectives.ALGORITHMS``.
    rates
        None for `default_rates`.
    """
    check_callable(stages, "stages")
    check_type(problem, Problem, "problem")
    rates = default_rates() if rates is None else rates
    check_type(rates, Rates, "rates")
    phases = dict.fromkeys(("select", "encode", "exchange", "reduce"), 0.0)
    for stage in _listed(stages, problem):
        if isinstance(stage, Exchange):
            phases["exchange"] += stage.rounds * _message_seconds(stage, problem, rates)
        elif isinstance(stage, EngineSum):
            phases["exchange"] += _engine_seconds(stage, problem, rates)
        else:
            phases[KINDS[stage.kind].phase] += work_seconds(stage, rates)
    traffic = count(stages, problem)
    volume = round(max(traffic.bytes_sent, traffic.bytes_received))
    return Prediction(sum(phases.values()), **phases, bytes=volume, rounds=traffic.rounds)


def choose(candidates: Mapping[str, Stages], problem: Problem, rates: Rates | None = None) -> str:
    """Return the candidate that is predicted to be the fastest; of equal ones, the first.

    Only the arguments decide, so ranks with equal arguments make the same choice.
    """
    if not candidates:
        raise InputError("choose needs at least one candidate, got none")
    return min(candidates, key=lambda name: predict(candidates[name], problem, rates).seconds)


def work_seconds(stage: Work, rates: Rates) -> float:
    """Return the seconds of work; ranks slow each other less if fewer of them work at once."""
    shared = max(1.0, rates.crowding * stage.busy) / rates.crowding
    return stage.times * rates[stage.kind](stage.amount) * shared


def _message_seconds(stage: Exchange, problem: Problem, rates: Rates) -> float:
    """Return the seconds of one message of an exchange."""
    between = rates[stage.pattern]
    # A gather inside a node is not measured; a rotation sends as many messages.
    inner_pattern = "rotate" if stage.pattern == "gather" else stage.pattern
    within: Curve = rates.curves.get(f"node.{inner_pattern}", between)
    if stage.inside:
        return within(stage.nbytes)
    here = problem.ranks_per_node
    if stage.pattern in ("rotate", "gather") or here == 1 or stage.distance >= here:
        return between(stage.nbytes)
    # This many of a node's ranks have a peer on another node, and share the node's link.
    crossing = stage.distance / here if stage.pattern == "shift" else 0.0
    inner = within(stage.nbytes)
    return max(inner, between(stage.nbytes * crossing)) if crossing else inner


def _engine_seconds(stage: EngineSum, problem: Problem, rates: Rates) -> float:
    """Return the seconds of the engine's sum, scaled from the measured to this number of ranks.

    Where it is a sum of one rank of each node, the nodes' other ranks sum at the same time. The
    links then carry as much as one sum of all their bytes.
    """
    curve = rates["dense.bfloat16" if stage.itemsize == 2 else "dense.float32"]
    sums = min(problem.ranks_per_node, problem.ranks // stage.ranks)
    measured, asked, had = curve(sums * stage.nbytes), stage.ranks, rates.ranks
    if asked == had or had == 1:
        return measured
    return measured * (asked - 1) / asked * had / (had - 1)
