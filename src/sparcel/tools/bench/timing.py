"""The time of a cell: measured, with its phases, bytes and wrong coordinates, and predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from sparcel.core.comm import Communicator
from sparcel.core.cost import (
    COLLECTIVES,
    STEPS,
    Problem,
    Rates,
    measure,
    predict,
    read_rates,
)
from sparcel.core.cost.formulas import fastest_sum
from sparcel.core.cost.predict import Formula, expected_union
from sparcel.core.cost.steps import engine_sum
from sparcel.core.formats import RAW, Format
from sparcel.core.ops import MAX, SUM, Op
from sparcel.core.profiling import timed_by
from sparcel.errors import checked_name
from sparcel.tools.bench import NOW
from sparcel.tools.bench.contenders import DENSE, STEP, BenchEngine, Contender
from sparcel.tools.bench.inputs import Case

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


def set_rates(engines: Sequence[BenchEngine], sources: Mapping[str, str]) -> dict[str, Rates]:
    """Give the engines' communicators their rates, by which ``auto`` chooses; all ranks call.

    Returns the rates by engine, from a file or measured now.

    Parameters
    ----------
    sources
        By engine, a file that `sparcel plan --measure` saved, or `NOW`; "" stands for all other
        engines.

    Raises
    ------
    InputError
        When an engine is not in this run, or a file holds no rates.
    """
    names = [engine.name for engine in engines]
    for name in filter(None, sources):
        checked_name(name, names, "engine")
    rates = {}
    for engine in engines:
        source = sources.get(engine.name, sources.get(""))
        if source == NOW:
            rates[engine.name] = measure(engine.comm, engine.name)
        elif source is not None:
            rates[engine.name] = read_rates(source)
        engine.comm.rates = rates.get(engine.name)
    return rates


def predicted(
    name: str, case: Case, ranks_per_node: int, rates: Rates | None, format: Format = RAW
) -> float | None:
    """Return the predicted seconds of the row ``name``, or None without a prediction."""
    formula = formula_of(name)
    if rates is None or formula is None:
        return None
    return predict(formula, problem_of(name, case, ranks_per_node, format), rates).seconds


def problem_of(name: str, case: Case, ranks_per_node: int, format: Format = RAW) -> Problem:
    """Return the problem that the row ``name`` of a case solves."""
    dense = name in DENSE
    return Problem(
        size=case.size,
        k=case.size if dense else case.k,
        ranks=case.ranks,
        ranks_per_node=ranks_per_node,
        spread=None if dense else _spread(case),
        format=format,
    )


def formula_of(name: str) -> Formula | None:
    """Return the formula of the row ``name``, or None if there is none."""
    if name in DENSE:
        return engine_sum(DENSE[name].itemsize)
    if name.startswith(STEP):
        return STEPS.get(name.removeprefix(STEP))
    return fastest_sum if name == "auto" else COLLECTIVES.get(name)


def _spread(case: Case) -> int:
    """Return the size of a vector in which independent choices have as large a union as these."""
    union = case.total.indices.numel()
    low, high = case.k, case.size
    while low < high:
        middle = (low + high) // 2
        if expected_union(middle, case.k, case.ranks) < union:
            low = middle + 1
        else:
            high = middle
    return low
