"""Measures the rates of a cluster on all of its ranks at once, in seconds to a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from os import PathLike
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from sparcel._checks import whole_number
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
"""How many times all points are timed. A temporary disturbance of the machine then affects only
some samples of each point."""

_AMOUNTS = {
    "coordinates": _COORDINATES,
    "bytes": (128, 8 << 10, 128 << 10, 1 << 20, 8 << 20),
    "operations": (1, 100),
}
"""Amounts to time, by the unit of the work; all other work uses `_ENTRIES`."""

_BUDGET_SECONDS, _MOST = 0.02, 5
"""Seconds to time a point in a pass, and the most samples; a slow point is timed once."""

_LONG_SECONDS = 0.15
"""A point that takes longer is timed once in a pass, because its first call costs little extra."""

_SLOW_SECONDS = 0.6
"""A curve ends at the first amount that takes longer. Times beyond it are extrapolated."""

_LOOP_SECONDS = 4e-3
"""Work is repeated for this long, several time slices of the scheduler. Ranks that share a core
then slow each other down as they do in a step."""


def rates_for(comm: Communicator, source: Rates | str | PathLike[str]) -> Rates:
    """Return the rates that ``source`` means; all ranks must call this.

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
        return measure(comm, passes=1)
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
    except (OSError, ValueError) as error:  # a UnicodeDecodeError and an InputError are ValueErrors
        raise InputError(f"can't read rates from {path}: {error}") from error


def measure(comm: Communicator, description: str = "", passes: int = _PASSES) -> Rates:
    """Time messages, the engine's all-reduce and the ranks' work; all ranks must call this.

    It takes ten to twenty seconds on eight ranks joined by 1 Gbit/s, and some 300 MB of memory.

    Parameters
    ----------
    description
        Text that is stored with the rates, for example the cluster's name; by default that they
        were measured, and on how many ranks.
    passes
        How many times all points are timed.

    Returns
    -------
    Rates
        The same on all ranks: medians of the slowest rank's times.

    Raises
    ------
    InputError
        When there is only one rank, or messages are in GPU memory.
    """
    passes = whole_number(passes, "passes", at_least=1)
    if comm.device.type != "cpu":
        raise InputError(
            f"rates can be measured only for messages on the CPU, but comm's are on {comm.device};"
            " keep comm.rates as it is, or set it to sparcel.cost.stated_rates(...)"
        )
    if comm.size < 2:
        raise InputError("measuring rates needs at least 2 ranks, got 1")
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
    description = description or f"measured on {comm.size} ranks"
    return Rates(curves, comm.size, here, crowding, description=description)


_CROWD = 1 << 16
"""Entries to merge, on all ranks at once and then on one rank alone."""


@dataclass(eq=False)
class _Point:
    """One point of a curve, with its samples: seconds a round, of the slowest rank."""

    name: str
    amount: int
    make: Callable[[int], Trial]
    loop_seconds: float
    repeats: int = 0
    samples: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median of the samples."""
        return median(self.samples)


def _everything(
    comm: Communicator, here: int
) -> Iterator[tuple[str, Sequence[int], Callable[[int], Trial], float]]:
    """Yield each curve's name, amounts, function that makes a trial, and seconds to repeat it."""
    for name, make in trials.exchanges(comm, here):
        to_all = name.endswith(("rotate", "gather"))  # these send P−1 messages at once
        yield name, _MESSAGES[: -1 if to_all else None], make, 0.0
    for kind in (torch.float32, torch.bfloat16):
        name, make = str(kind).replace("torch", "dense"), trials.engine_sum(comm, kind)
        yield name, [kind.itemsize * floats for floats in _FLOATS], make, 0.0
    for name, make in trials.work(comm.size, comm.rank).items():
        yield name, _AMOUNTS.get(WORK[name], _ENTRIES), make, _LOOP_SECONDS


def _alone(comm: Communicator) -> Callable[[int], Trial]:
    """Return a function that makes a trial: rank 0 merges, the other ranks do nothing."""
    merge = trials.work(comm.size, 0)["merge"]
    return lambda amount: merge(amount) if comm.rank == 0 else Trial(lambda: None)


def _sample(comm: Communicator, curve: Sequence[_Point]) -> None:
    """Add samples to a curve's points, up to the first slow one."""
    for point in curve:
        trial = point.make(point.amount)
        if point.loop_seconds:
            trial.run()  # warms up pages and caches
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
    """Return the slowest rank's seconds of each of ``count`` runs, the same on all ranks."""
    own = [_once(comm, trial, repeats, until_all) for _ in range(count)]
    seconds = torch.tensor(own, dtype=torch.float64)
    comm.run(lambda: comm.all_reduce(seconds, MAX))
    slowest: list[float] = seconds.tolist()
    return slowest


def _once(comm: Communicator, trial: Trial, repeats: int, until_all: bool) -> float:
    """Return the seconds from a barrier until this rank has finished.

    With ``until_all``, return the seconds until all ranks have finished, less the time of a
    barrier. Ranks that share a core may work one after the other, and a rank's own time does not
    show that.
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
