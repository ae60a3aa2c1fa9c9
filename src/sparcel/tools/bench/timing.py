"""Measures one cell of the table: time, phases, bytes and wrong coordinates of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from sparcel.core.comm import Communicator
from sparcel.core.ops import MAX, SUM, Op
from sparcel.core.profiling import timed_by
from sparcel.tools.bench.contenders import Contender

_PHASE_OF = {
    "select": "select",
    "encode": "encode",
    "decode": "encode",
    "messages": "exchange",
    "reduce": "reduce",
    "update": "reduce",
}
"""The phase of each part of a program that counts; see `sparcel.core.profiling`."""

PHASES = tuple(dict.fromkeys(_PHASE_OF.values()))


class Stopwatch:
    """Seconds by phase. A phase inside another one stops the outer one's clock."""

    def __init__(self) -> None:
        self.restart()
        self._running: list[str] = []
        self._since = 0.0

    def restart(self) -> None:
        """Count from zero."""
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block as of the phase of this part, if it has one."""
        if name not in _PHASE_OF:
            yield
            return
        self._switch()
        self._running.append(_PHASE_OF[name])
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        now = perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


@contextmanager
def watched() -> Iterator[Stopwatch]:
    """Time the phases of the calls in the block, on any thread, one call at a time."""
    watch = Stopwatch()
    with timed_by(watch.part):
        yield watch


_WATCHED_ITERATIONS = 5
"""Most iterations with a stopwatch for the phases, after the timed ones, which have none."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one contender, the same on all ranks.

    Attributes
    ----------
    seconds
        Time of the slowest rank in each iteration.
    phases
        Seconds by phase: the ranks' mean, median over iterations.
    bytes
        The larger of the bytes sent and received, at the worst rank, in an average iteration.
    wrong
        Number of wrong coordinates in the checked results, summed over ranks.
    """

    seconds: list[float]
    phases: dict[str, float]
    bytes: int
    wrong: int


def merged(rounds: Sequence[Measured]) -> Measured:
    """Return the measurements of one contender in several rounds as one."""
    phases = {name: median(found.phases[name] for found in rounds) for name in PHASES}
    return Measured(
        [seconds for found in rounds for seconds in found.seconds],
        phases,
        round(sum(found.bytes for found in rounds) / len(rounds)),
        sum(found.wrong for found in rounds),
    )


def time_contender(
    contender: Contender, comm: Communicator, iterations: int, warmup: int
) -> Measured:
    """Time the iterations of a contender, each after a barrier; all ranks call.

    The results of the last warm-up run and of the last timed run are checked, off the clock.
    """
    for _ in range(max(1, warmup)):
        contender.reset()
        result = contender.run()
    wrong = contender.wrong(result)
    del result
    seconds, nbytes = [], 0
    for left in reversed(range(iterations)):
        _prepare(contender, comm)
        sent, received = comm.traffic.bytes_sent, comm.traffic.bytes_received
        start = perf_counter()
        result = contender.run()
        if left:
            del result  # on the clock, because callers free results too
        seconds.append(perf_counter() - start)
        now = comm.traffic
        nbytes += max(now.bytes_sent - sent, now.bytes_received - received)
    wrong += contender.wrong(result)
    if contender.bytes is not None:
        nbytes = contender.bytes * iterations
    slowest: list[float] = _reduced(torch.tensor(seconds, dtype=torch.float64), comm, MAX).tolist()
    counts = _reduced(torch.tensor([nbytes / iterations], dtype=torch.float64), comm, MAX)
    if contender.bytes is None:
        phases = _phases(contender, comm, min(iterations, _WATCHED_ITERATIONS))
    else:
        phases = dict.fromkeys(PHASES, 0.0) | {"exchange": median(slowest)}
    total_wrong = int(_reduced(torch.tensor([wrong]), comm, SUM))
    return Measured(slowest, phases, round(float(counts)), total_wrong)


def _phases(contender: Contender, comm: Communicator, iterations: int) -> dict[str, float]:
    rows = []
    with watched() as watch:
        for _ in range(iterations):
            _prepare(contender, comm)
            watch.restart()
            contender.run()
            rows.append([watch.seconds[phase] for phase in PHASES])
    mean = _reduced(torch.tensor(rows, dtype=torch.float64), comm, SUM) / comm.size
    return dict(zip(PHASES, mean.median(dim=0).values.tolist(), strict=True))


def _prepare(contender: Contender, comm: Communicator) -> None:
    """Prepare an iteration, and wait for all ranks."""
    contender.reset()
    comm.run(lambda: comm.gather_numbers(0))


def _reduced(tensor: Tensor, comm: Communicator, op: Op) -> Tensor:
    comm.all_reduce(tensor, op)
    return tensor
