"""The rates of a cluster, timed on all of its ranks at once, in seconds to a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from os import PathLike
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from sparcel.comm import Communicator
from sparcel.cost import trials
from sparcel.cost.trials import Trial
from sparcel.errors import InputError
from sparcel.ops import MAX
from sparcel.rates import WORK, Curve, Rates

_MESSAGES = (64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
_FLOATS = (64, 1 << 10, 16 << 10, 256 << 10, 2 << 20, 16 << 20)
_ENTRIES = (16, 1 << 10, 16 << 10, 128 << 10, 1 << 20)
_COORDINATES = (256, 16 << 10, 256 << 10, 2 << 20, 16 << 20)

_PASSES = 3
"""Everything is timed this often, so that a short disturbance spoils only a part of each point's
samples."""

_AMOUNTS = {
    "coordinates": _COORDINATES,
    "bytes": (128, 8 << 10, 128 << 10, 1 << 20, 8 << 20),
    "operations": (1, 100),
}
"""By the unit of the work; all other is measured in entries."""

_BUDGET_SECONDS, _MOST = 0.02, 5
"""How long a point is timed in a pass, and how often at most; once where it is slow."""

_LONG_SECONDS = 0.15
"""What takes longer is timed once in a pass: no first call weighs there."""

_SLOW_SECONDS = 0.6
"""A curve ends at the first amount that takes longer; beyond it, time is in proportion."""

_LOOP_SECONDS = 4e-3
"""Work is repeated for as long, some turns of the scheduler's, so that ranks that share a core
get in each other's way as they do in a step."""


def rates_for(comm: Communicator, source: Rates | str | PathLike[str]) -> Rates:
    """Return the rates that ``source`` means; all ranks call.

    Parameters
    ----------
    source
        Rates, which are returned; ``"measure"`` to measure them in one pass, some seconds; or the
        path of a file that ``sparcel plan --measure --save`` wrote.

    Raises
    ------
    InputError
        When the file holds no rates; see `measure` for the rest.
    """
    if isinstance(source, Rates):
        return source
    if source == "measure":
        return measure(comm, "measured at the start of the training", passes=1)
    return read_rates(source)


def read_rates(path: str | PathLike[str]) -> Rates:
    """Read rates from a file that ``sparcel plan --measure --save`` wrote.

    Raises
    ------
    InputError
        When it cannot be read, or holds something else.
    """
    try:
        return Rates.from_json(Path(path).read_text())
    except OSError as error:
        raise InputError(f"can't read rates: {error}") from error


def measure(comm: Communicator, description: str = "", passes: int = _PASSES) -> Rates:
    """Time messages, the engine's all-reduce and the ranks' work; all ranks call.

    Takes ten to twenty seconds on eight ranks joined by 1 Gbit/s, and some 300 MB of memory.

    Parameters
    ----------
    description
        What the rates are of, to be kept with them.
    passes
        How often everything is timed.

    Returns
    -------
    Rates
        The same on all ranks: medians of the slowest rank's times.

    Raises
    ------
    InputError
        When there is only one rank, or messages live on a GPU.
    """
    if comm.device.type != "cpu":
        raise InputError(
            f"rates are measured of messages on the CPU, and comm's live on {comm.device}; leave"
            " comm.rates alone, or state them with sparcel.cost.stated_rates"
        )
    if comm.size < 2:
        raise InputError("there is nothing to measure between ranks where there is only one")
    here = comm.run(comm.ranks_per_node)
    points = [
        _Point(name, amount, make, loop_seconds)
        for name, amounts, make, loop_seconds in _everything(comm, here)
        for amount in amounts
    ]
    for _ in range(passes):
        for _, group in groupby(points, key=lambda point: point.name):
            _sample(comm, list(group))
    alone = _Point("alone", _CROWD, _alone(comm), 3 * _LOOP_SECONDS)
    together = _Point("together", _CROWD, trials.work(comm.size, 0)["merge"], 3 * _LOOP_SECONDS)
    for _ in range(2 * passes):
        _sample(comm, [together, alone])
    curves = {
        name: Curve(tuple((float(point.amount), point.seconds) for point in group if point.samples))
        for name, group in groupby(points, key=lambda point: point.name)
    }
    crowding = max(1.0, together.seconds / alone.seconds)
    return Rates(curves, comm.size, here, crowding, description=description)


_CROWD = 1 << 16
"""Entries that are merged by all ranks, and by one alone."""


@dataclass(eq=False)
class _Point:
    """One point of a curve, with what was timed so far: the slowest rank's seconds, a round."""

    name: str
    amount: int
    make: Callable[[int], Trial]
    loop_seconds: float
    repeats: int = 0
    samples: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.samples)


def _everything(
    comm: Communicator, here: int
) -> Iterator[tuple[str, Sequence[int], Callable[[int], Trial], float]]:
    """Yield each curve's name, the amounts to time, what makes a trial, and how long it loops."""
    for name, make in trials.exchanges(comm, here):
        to_all = name.endswith(("rotate", "gather"))  # P−1 messages, of a P-th each
        yield name, _MESSAGES[: -1 if to_all else None], make, 0.0
    for kind in (torch.float32, torch.bfloat16):
        name, make = str(kind).replace("torch", "dense"), trials.engine_sum(comm, kind)
        yield name, [kind.itemsize * floats for floats in _FLOATS], make, 0.0
    for name, make in trials.work(comm.size, comm.rank).items():
        yield name, _AMOUNTS.get(WORK[name], _ENTRIES), make, _LOOP_SECONDS


def _alone(comm: Communicator) -> Callable[[int], Trial]:
    """Return what makes a trial of merging on rank 0, and of nothing on the others."""
    merge = trials.work(comm.size, 0)["merge"]
    return lambda amount: merge(amount) if comm.rank == 0 else Trial(lambda: None)


def _sample(comm: Communicator, curve: Sequence[_Point]) -> None:
    """Time a curve's points some more, up to the first that is slow."""
    for point in curve:
        trial = point.make(point.amount)
        if point.loop_seconds:
            trial.run()  # pages, caches
        pilot = _slowest(comm, trial, 1, 1, until_all=False)[0]
        if not point.repeats:
            point.repeats = max(1, min(1000, round(point.loop_seconds / max(pilot, 1e-6))))
        each = max(pilot * point.repeats, 1e-6)
        if pilot > _LONG_SECONDS and not point.loop_seconds:
            seconds = [pilot]
        else:
            count = max(1, min(_MOST, round(_BUDGET_SECONDS / each)))
            seconds = _slowest(comm, trial, point.repeats, count, point.loop_seconds > 0)
            seconds = [second / point.repeats for second in seconds]
        point.samples += [second / trial.rounds for second in seconds]
        if point.seconds * trial.rounds > _SLOW_SECONDS:
            return


def _slowest(
    comm: Communicator, trial: Trial, repeats: int, count: int, until_all: bool
) -> list[float]:
    """Return the slowest rank's seconds of each of ``count`` goes, the same on all ranks."""
    own = [_once(comm, trial, repeats, until_all) for _ in range(count)]
    seconds = torch.tensor(own, dtype=torch.float64)
    comm.run(lambda: comm.all_reduce(seconds, MAX))
    slowest: list[float] = seconds.tolist()
    return slowest


def _once(comm: Communicator, trial: Trial, repeats: int, until_all: bool) -> float:
    """Return this rank's seconds after a barrier, until it is done or, less a barrier, all are.

    Ranks that share a core may do their work one after the other, which each by itself does not
    see.
    """

    def barrier() -> None:
        comm.gather_numbers(0)

    def job() -> None:
        for _ in range(repeats):
            trial.run()
        if until_all:
            barrier()

    comm.run(barrier)
    waited = perf_counter()
    if until_all:
        comm.run(barrier)
    start = perf_counter()
    comm.run(job)
    return max(0.0, perf_counter() - start - (start - waited if until_all else 0.0))
