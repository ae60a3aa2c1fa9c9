"""The rates of a cluster, timed on all of its ranks at once, in seconds to a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter

import torch

from sparcel.comm import Communicator
from sparcel.comm.nodes import consecutive_per_node
from sparcel.cost import trials
from sparcel.cost.rates import Curve, Rates
from sparcel.cost.trials import Trial
from sparcel.errors import InputError
from sparcel.ops import MAX

_MESSAGES = (64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
_FLOATS = (64, 1 << 10, 16 << 10, 256 << 10, 2 << 20, 16 << 20)
_ENTRIES = (16, 1 << 10, 16 << 10, 128 << 10, 1 << 20)
_COORDINATES = (256, 16 << 10, 256 << 10, 2 << 20, 16 << 20)

_BUDGET_SECONDS, _FEWEST, _MOST = 0.06, 3, 15
"""How long a point is timed, and how often at least and at most; once where it is slow."""

_SLOW_SECONDS = 0.6
"""A curve ends at the first amount that takes longer; beyond it, time is in proportion."""

_LOOP_SECONDS = 4e-3
"""Work is repeated for as long, some turns of the scheduler's, so that ranks that share a core
get in each other's way as they do in a step."""


def measure(comm: Communicator, description: str = "") -> Rates:
    """Time messages, the engine's all-reduce and the ranks' work; all ranks call.

    Takes ten to twenty seconds on eight ranks joined by 1 Gbit/s, and some 300 MB of memory.

    Parameters
    ----------
    description
        What the rates are of, to be kept with them.

    Returns
    -------
    Rates
        The same on all ranks: medians of the slowest rank's times.

    Raises
    ------
    InputError
        When there is only one rank.
    """
    if comm.size < 2:
        raise InputError("there is nothing to measure between ranks where there is only one")
    here = comm.run(lambda: consecutive_per_node(comm))
    curves = {}
    for name, make in trials.exchanges(comm, here):
        curves[name] = _curve(comm, make, _MESSAGES)
    for kind in (torch.float32, torch.bfloat16):
        name = str(kind).replace("torch", "dense")
        amounts = [kind.itemsize * floats for floats in _FLOATS]
        curves[name] = _curve(comm, trials.engine_sum(comm, kind), amounts)
    work = trials.work(comm.size, comm.rank)
    for name, make in work.items():
        counts = _COORDINATES if name in ("select", "fill", "add") else _ENTRIES
        scale = 8 if name == "encode" else 1  # bytes
        curves[name] = _curve(comm, make, [scale * count for count in counts], _LOOP_SECONDS)
    crowding = _crowding(comm, work["merge"])
    return Rates(curves, comm.size, here, crowding, description=description)


def _curve(
    comm: Communicator,
    make: Callable[[int], Trial],
    amounts: Iterable[int],
    loop_seconds: float = 0.0,
) -> Curve:
    points = []
    for amount in amounts:
        seconds = _time(comm, make(amount), loop_seconds)
        points.append((float(amount), seconds))
        if seconds > _SLOW_SECONDS:
            break
    return Curve(tuple(points))


def _time(comm: Communicator, trial: Trial, loop_seconds: float) -> float:
    """Return the seconds of one of the trial's rounds, the same on all ranks."""
    own = round(1e9 * _once(comm, trial, 1))  # and pages, connections, caches
    pilot = max(comm.run(lambda: comm.gather_numbers(own))) / 1e9
    repeats = max(1, min(1000, round(loop_seconds / max(pilot, 1e-6))))
    each = max(pilot * repeats, 1e-6)
    count = max(_FEWEST if each < _SLOW_SECONDS else 1, min(_MOST, round(_BUDGET_SECONDS / each)))
    seconds = torch.tensor([_once(comm, trial, repeats) for _ in range(count)])
    comm.run(lambda: comm.all_reduce(seconds, MAX))
    slowest: list[float] = seconds.tolist()
    return median(slowest) / repeats / trial.rounds


def _once(comm: Communicator, trial: Trial, repeats: int) -> float:
    """Return this rank's seconds, after a barrier."""
    comm.run(lambda: comm.gather_numbers(0))

    def job() -> None:
        for _ in range(repeats):
            trial.run()

    start = perf_counter()
    comm.run(job)
    return perf_counter() - start


def _crowding(comm: Communicator, make: Callable[[int], Trial]) -> float:
    """Return how many times as long work takes while all ranks do it, as on one alone."""
    trial, idle = make(1 << 16), Trial(lambda: None)
    together = _time(comm, trial, 5 * _LOOP_SECONDS)
    alone = _time(comm, trial if comm.rank == 0 else idle, 5 * _LOOP_SECONDS)
    return max(1.0, together / alone)
