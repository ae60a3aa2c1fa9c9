"""Measures the rates of a cluster on all of its ranks at once, in seconds to a minute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time

import torch

from sparcel.core import patterns
from sparcel.core._checks import checked_whole
from sparcel.core.comm import Communicator, Staged
from sparcel.core.cost.defaults import KINDS, Kind, Run
from sparcel.core.ops import MAX, SUM
from sparcel.core.rates import WORK, Curve, Rates
from sparcel.errors import InputError

_MESSAGES = (64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
_FLOATS = (64, 1 << 10, 16 << 10, 256 << 10, 2 << 20, 16 << 20)

_PASSES = 3
"""How many times all points are timed. A temporary disturbance of the machine then affects only
some samples of each point."""

_BUDGET_SECONDS, _MOST = 0.02, 5
"""Seconds to time a point in a pass, and the most samples; a slow point is timed once."""

_LONG_SECONDS = 0.15
"""A point that takes longer is timed once in a pass, because its first call costs little extra."""

_SLOW_SECONDS = 0.6
"""A curve ends at the first amount that takes longer. Times beyond it are extrapolated."""

_CROWD, _LOOP_SECONDS = 1 << 16, 12e-3
"""Entries to merge on all ranks at once, and for how long: several time slices of the scheduler."""


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

    It takes twenty to thirty seconds on eight ranks joined by 1 Gbit/s, and some 300 MB of memory.

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
        The same on all ranks: medians of the slowest rank's times. Where ranks share cores, short
        work takes its processor time multiplied by the crowding.

    Raises
    ------
    InputError
        When there is only one rank, or messages are in the memory of GPUs, as over NCCL.
    """
    passes = checked_whole(passes, "passes", at_least=1)
    if isinstance(comm, Staged):
        comm = comm.inner  # which carries the messages
    if comm.device.type != "cpu":
        raise InputError(
            f"rates cannot be measured over {comm.carrier}, whose messages are on {comm.device};"
            " give rates=sparcel.cost.stated_rates(...), or a file, or carrier='host'"
        )
    if comm.size < 2:
        raise InputError(
            "measuring rates needs at least 2 ranks, got 1; start several by torchrun or mpiexec,"
            " or give rates=sparcel.cost.stated_rates(...)"
        )
    here = comm.run(comm.ranks_per_node)
    timed = list(_everything(comm, here))
    for _ in range(passes):
        for one in timed:
            one.sample(comm)
    crowding = _crowding(comm, _MOST * passes)
    curves = {one.name: one.curve(crowding) for one in timed}
    description = description or f"measured on {comm.size} ranks"
    return Rates(curves, comm.size, here, crowding, description=description)


@dataclass(frozen=True)
class Trial:
    """A call to time, which consists of ``rounds`` equal consecutive parts."""

    run: Run
    rounds: int = 1


@dataclass(eq=False)
class _Timed:
    """What is timed for a curve, and its samples by amount, in seconds a round.

    A sample has two times: that of the slowest rank by the clock, and the ranks' average processor
    time.
    """

    name: str
    amounts: Sequence[int]
    make: Callable[[int], Trial]
    samples: defaultdict[int, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def sample(self, comm: Communicator) -> None:
        """Add samples of each amount, up to the first slow one; all ranks call.

        A barrier comes before each sample, as messages come before all work of an algorithm. The
        code and the data of the work are then no longer in the caches, and small work takes several
        times as long as in a loop.
        """
        for amount in self.amounts:
            trial = self.make(amount)
            if self.name in WORK:
                trial.run()  # touches new pages
            samples = _times(comm, trial, 1)
            pilot, _ = samples[0]
            if pilot < _LONG_SECONDS:
                count = max(1, min(_MOST, round(_BUDGET_SECONDS / max(pilot, 1e-6))))
                samples = _times(comm, trial, count)
            found = self.samples[amount]
            found += [(clock / trial.rounds, used / trial.rounds) for clock, used in samples]
            if median(clock for clock, _ in found) * trial.rounds > _SLOW_SECONDS:
                return

    def curve(self, crowding: float) -> Curve:
        """Return the seconds that all ranks take, where they share cores.

        Work of less than a time slice has the core for itself, so its own clock does not show that
        the ranks take turns.
        """
        points = []
        for amount, samples in self.samples.items():
            clock, processor = map(median, zip(*samples, strict=True))
            shared = crowding * processor if self.name in WORK else 0.0
            points.append((float(amount), max(clock, shared)))
        return Curve(tuple(points))


def _everything(comm: Communicator, here: int) -> Iterator[_Timed]:
    """Yield what is timed, in the order in which it is."""
    for name, make in _exchanges(comm, here):
        to_all = name.endswith(("rotate", "gather"))  # these send P−1 messages at once
        yield _Timed(name, _MESSAGES[: -1 if to_all else None], make)
    for dtype in (torch.float32, torch.bfloat16):
        amounts = [dtype.itemsize * floats for floats in _FLOATS]
        name = str(dtype).replace("torch", "dense")
        yield _Timed(name, amounts, partial(_engine_sum, comm, dtype))
    for name, kind in KINDS.items():
        yield _Timed(name, kind.amounts, partial(_work, kind, comm.rank))


def _work(kind: Kind, seed: int, amount: int) -> Trial:
    return Trial(kind.trial(amount, seed))


def _times(comm: Communicator, trial: Trial, count: int) -> list[tuple[float, float]]:
    """Return the slowest rank's time, and the average processor time, of each of ``count`` runs.

    They are the same on all ranks.
    """
    own = [_once(comm, trial) for _ in range(count)]
    clocks, used = (torch.tensor(times, dtype=torch.float64) for times in zip(*own, strict=True))
    comm.run(lambda: comm.all_reduce(clocks, MAX))
    comm.run(lambda: comm.all_reduce(used, SUM))
    return list(zip(clocks.tolist(), (used / comm.size).tolist(), strict=True))


def _once(comm: Communicator, trial: Trial) -> tuple[float, float]:
    """Return this rank's seconds from a barrier on, by the clock and by the processor."""
    comm.run(lambda: comm.gather_numbers(0))

    def job() -> tuple[float, float]:
        start, used = perf_counter(), thread_time()
        trial.run()
        return perf_counter() - start, thread_time() - used

    return comm.run(job)


def _crowding(comm: Communicator, samples: int) -> float:
    """Return how many times as long as its processor time a merge takes, if all ranks merge."""
    merge = KINDS["merge"].trial(_CROWD, 0)
    _, processor = _times(comm, Trial(merge), 2)[1]
    repeats = max(1, min(1000, round(_LOOP_SECONDS / max(processor, 1e-6))))

    def run() -> None:
        for _ in range(repeats):
            merge()

    times = _times(comm, Trial(run), samples)
    return max(1.0, median(clock / max(processor, 1e-6) for clock, processor in times))


def _exchanges(
    comm: Communicator, ranks_per_node: int
) -> Iterator[tuple[str, Callable[[int], Trial]]]:
    """Yield each pattern's name, and a function from a message's bytes to a trial."""
    everybody = comm.size
    here = ranks_per_node if ranks_per_node < everybody else 1
    yield "shift", lambda nbytes: _in_turn(comm, _neighbours(comm.rank, here, everybody), nbytes)
    yield "tree", lambda nbytes: _broadcast(comm, nbytes, here)
    yield "rotate", lambda nbytes: _to_all(comm, nbytes, range(everybody))
    yield "gather", lambda nbytes: _gather(comm, nbytes)
    if here > 1:
        first = comm.rank // here * here
        place, members = comm.rank - first, range(first, first + here)
        around = [(first + to, first + source) for to, source in _neighbours(place, 1, here)]
        yield "node.shift", lambda nbytes: _in_turn(comm, around, nbytes)
        yield "node.rotate", lambda nbytes: _to_all(comm, nbytes, members)


def _engine_sum(comm: Communicator, dtype: torch.dtype, nbytes: int) -> Trial:
    vector = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    return Trial(lambda: comm.all_reduce(vector))


def _neighbours(rank: int, nearest: int, ranks: int) -> list[tuple[int, int]]:
    """Return the ranks that a rank sends to and receives from in each round of a gather."""
    rounds = patterns.bruck(0, -(-ranks // nearest))
    distances = [nearest * distance for _, _, distance, _ in rounds]
    return [((rank - far) % ranks, (rank + far) % ranks) for far in distances]


def _in_turn(comm: Communicator, peers: list[tuple[int, int]], nbytes: int) -> Trial:
    message = torch.zeros(nbytes, dtype=torch.uint8)

    def run() -> None:
        for to, source in peers:
            if to != comm.rank:
                comm.exchange({to: message}, {source: nbytes})

    return Trial(run, max(1, len(peers)))


def _broadcast(comm: Communicator, nbytes: int, here: int) -> Trial:
    """Send a message down a binomial tree of each node's first rank."""
    held = torch.zeros(nbytes, dtype=torch.uint8)
    levels = patterns.binomial_tree(comm.rank // here, comm.size // here)

    def run() -> None:
        for to, source, *_ in levels if comm.rank % here == 0 else ():
            if to is not None:
                comm.exchange({to * here: held}, {})
            elif source is not None:
                comm.exchange({}, {source * here: nbytes})

    return Trial(run, max(1, len(levels)))


def _to_all(comm: Communicator, nbytes: int, members: range) -> Trial:
    message = torch.zeros(nbytes, dtype=torch.uint8)
    place, count = comm.rank - members.start, len(members)
    rounds = patterns.rotation(place, count)
    sends = {members[to]: message for to, *_ in rounds}
    receives = {members[source]: nbytes for _, source, *_ in rounds}
    return Trial(lambda: comm.exchange(sends, receives), max(1, len(rounds)))


def _gather(comm: Communicator, nbytes: int) -> Trial:
    message = torch.zeros(nbytes, dtype=torch.uint8)
    return Trial(lambda: comm.gather(message, nbytes), comm.size - 1)
