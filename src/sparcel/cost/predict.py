"""What a sum, or a step of training, costs: seconds, bytes and rounds, by its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sparcel.cost import schedule, topk_schedule, whole_steps
from sparcel.cost.defaults import default_rates
from sparcel.cost.problem import Problem
from sparcel.cost.rates import Rates
from sparcel.cost.schedule import Schedule
from sparcel.cost.steps import PHASES, EngineSum, Exchange
from sparcel.errors import InputError, known

LOSSLESS: dict[str, Schedule] = {
    "dense": schedule.dense,
    "allgather": schedule.allgather,
    "recursive_doubling": schedule.recursive_doubling,
    "halving_doubling": schedule.halving_doubling,
    "split_allgather": schedule.split_allgather,
    "ring": schedule.ring,
}
"""Sums of streams: the names of `sparcel.collectives.ALGORITHMS`."""

SCHEDULES: dict[str, Schedule] = {
    **LOSSLESS,
    "gtopk": topk_schedule.gtopk,
    "gathered_topk": topk_schedule.gathered_topk,
    "oktopk": topk_schedule.oktopk,
    "dense fp32": whole_steps.engine,
    "dense bf16": partial(whole_steps.engine, half=True),
    "step:dense": whole_steps.dense_step,
    "step:sparcml": whole_steps.sparcml_step,
    "step:gtopk": whole_steps.gtopk_step,
    "step:oktopk": whole_steps.oktopk_step,
    "step:scalecom": whole_steps.scalecom_step,
    "step:hitopk": whole_steps.hitopk_step,
    "step:torus2d": whole_steps.torus2d_step,
}

_CHOSEN = ("auto", "step:topk")
"""Sums by whichever lossless algorithm is the fastest."""

NAMES = (*SCHEDULES, *_CHOSEN)


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
        The larger of those sent and received, at the rank where it is largest.
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


def predict(algorithm: str, problem: Problem, rates: Rates | None = None) -> Prediction:
    """Return what ``algorithm`` costs.

    Parameters
    ----------
    algorithm
        One of `NAMES`: a lossless sum of streams, ``"gtopk"`` or ``"oktopk"``, the engine's
        ``"dense fp32"`` or ``"dense bf16"``, or a whole step of a scheme, ``"step:oktopk"``.
    rates
        None for the default ones.

    Raises
    ------
    InputError
        For an unknown name.
    """
    known(algorithm, NAMES, "algorithm")
    rates = rates or default_rates()
    phases = dict.fromkeys(("select", "encode", "exchange", "reduce"), 0.0)
    sent = received = 0.0
    rounds = 0
    for step in _schedule(algorithm, problem, rates)(problem):
        seconds = step.seconds(problem, rates)
        if isinstance(step, Exchange):
            nbytes = step.nbytes * step.messages * step.times
            sent, received = sent + nbytes * step.sends, received + nbytes * step.receives
            rounds += step.rounds
        elif isinstance(step, EngineSum):
            sent, received = sent + step.volume(problem), received + step.volume(problem)
            rounds += step.rounds_of(problem)
        else:
            phases[PHASES[step.kind]] += seconds
            continue
        phases["exchange"] += seconds
    return Prediction(
        sum(phases.values()), **phases, bytes=round(max(sent, received)), rounds=rounds
    )


def choose(candidates: Sequence[str], problem: Problem, rates: Rates | None = None) -> str:
    """Return which of the candidates is predicted to be the fastest, the first of equals.

    It depends on nothing but the arguments, so that ranks with equal ones choose alike.
    """
    if not candidates:
        raise InputError("there must be a candidate to choose")
    rates = rates or default_rates()
    return min(candidates, key=lambda name: predict(name, problem, rates).seconds)


def _schedule(algorithm: str, problem: Problem, rates: Rates) -> Schedule:
    if algorithm not in _CHOSEN:
        return SCHEDULES[algorithm]
    exchange = LOSSLESS[choose(tuple(LOSSLESS), problem, rates)]
    return exchange if algorithm == "auto" else partial(whole_steps.sparse_step, exchange)
