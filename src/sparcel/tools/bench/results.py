"""Results of a run: its cells, saved as JSON, and shown with its progress, tables and a summary."""

from __future__ import annotations

import json
import os
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Self

import torch

from sparcel.core.collectives import ALGORITHMS
from sparcel.errors import InputError
from sparcel.tools.bench.contenders import AS_MANY_BYTES, STEP

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def machine() -> dict[str, Any]:
    """Describe this machine and the versions of the software."""
    info = Path("/proc/cpuinfo")
    named = re.search("^model name\\s*: (.*)", info.read_text(), re.M) if info.exists() else None
    return {
        "processor": named[1].strip() if named else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sparcel": version("sparcel"),
    }


@dataclass
class Cell:
    """One measurement.

    Attributes
    ----------
    density, k, distribution
        For dense baselines, which depend on the size only: 1, the size, and ``"any"``.
    seconds
        Times of the slowest rank: ``all`` iterations, their ``median`` and ``p95``.
    phases
        Seconds of an average rank by phase: ``select``, ``encode`` (and decode), ``exchange``,
        ``reduce``.
    bytes
        The larger of the bytes sent and received by the worst rank, an iteration.
    wire_share
        The time that the bytes alone need on a node's link, as a share of the median; None if
        the link's rate is not known or several ranks share it.
    speedup
        Speed-up over the dense fp32 all-reduce of this size in the same run, on the faster engine.
    wrong
        Number of wrong coordinates in the checked results, summed over ranks.
    predicted
        Seconds predicted by the cost model; None without rates.
    format
        How sparse streams travelled; dense baselines have none.
    """

    engine: str
    algorithm: str
    size: int
    density: float
    k: int
    distribution: str
    dtype: str
    seconds: dict[str, Any]
    phases: dict[str, float]
    bytes: int
    wire_share: float | None
    speedup: float | None
    wrong: int
    predicted: float | None = None
    format: str = "raw"

    @property
    def median(self) -> float:
        """The median of the iterations, seconds."""
        return float(self.seconds["median"])


@dataclass
class Results:
    """A run: its command, network and machine, and its cells.

    Attributes
    ----------
    network
        ``description``, ``nodes``, ``ranks_per_node``, ``rate_bits_per_s`` (None if unknown).
    rates
        Rates behind the predictions, by engine, as `sparcel.cost.Rates` writes them.
    note
        What a reader must know of the results, as people add it later.
    """

    command: str
    network: dict[str, Any]
    world_size: int
    machine: dict[str, Any] = field(default_factory=machine)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    rates: dict[str, Any] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    note: str = ""

    def save(self, path: Path) -> None:
        """Write the results as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read results that `save` wrote.

        Raises
        ------
        InputError
            When the file holds no results.
        """
        try:
            document = json.loads(path.read_text())
            cells = [Cell(**cell) for cell in document.pop("cells")]
            return cls(**document, cells=cells)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} holds no results of `sparcel bench`: {error!r}") from error


def summarized(seconds: list[float]) -> dict[str, Any]:
    """Return the times with their median and 95th percentile."""
    p95 = quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return {"median": median(seconds), "p95": p95, "all": seconds}


Show = Callable[[Cell | None], None]

_WIDTH = 100
_LEGEND = """
time: of the slowest rank, median over iterations. sel., enc., exch., red.: time of an average rank
for selecting, encoding and decoding, exchanging, reducing. sent: bytes that the busiest rank sent
or received. wire: time that these bytes alone need on the link, as a share of the time. ×: speed-up
over dense fp32 on the faster engine. wrong: number of wrong coordinates."""


def console() -> Console:
    """Return the console of a run; if it is no terminal, it is at least as wide as the tables."""
    from rich.console import Console

    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = max(made.width, _WIDTH)
    return made


@contextmanager
def progress(console: Console | None, cells: int) -> Iterator[Show]:
    """Show finished cells: a bar on a terminal, lines elsewhere, nothing without a console."""
    if console is None:
        yield lambda cell: None
    elif not console.is_terminal:
        numbers = count(1)

        def show(cell: Cell | None) -> None:
            number = next(numbers)
            if cell is not None:
                console.print(f"{number}/{cells}  {_line(cell)}", soft_wrap=True)

        yield show
    else:
        from rich import progress as bars

        columns = (bars.TextColumn("{task.description:<60}"), bars.BarColumn())
        counted = (bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
        with bars.Progress(*columns, *counted, console=console, transient=True) as bar:
            task = bar.add_task("", total=cells)
            yield lambda cell: bar.update(task, advance=1, description=_line(cell))


def _line(cell: Cell | None) -> str:
    if cell is None:
        return ""
    what = "" if cell.distribution == "any" else f" {100 * cell.density:g} % {cell.distribution}"
    return f"{cell.engine} {cell.algorithm} {cell.size}{what}: {digits(1000 * cell.median)} ms"


def tables(results: Results) -> Iterator[Table | str]:
    """Yield the cells as tables, one for each size, density and distribution, and a legend."""
    from rich.table import Table

    yield f"{results.world_size} ranks: {results.network['description']}"
    columns = dict(_COLUMNS)
    if all(cell.predicted is None for cell in results.cells):
        columns.popitem()
    longest = max((len(cell.algorithm) for cell in results.cells), default=0)
    for heading in dict.fromkeys(map(_heading, results.cells)):
        made = Table(box=None, padding=(0, 1, 0, 0), title=f"\n{heading}", title_justify="left")
        made.add_column("algorithm", no_wrap=True, min_width=longest)
        made.add_column("on", no_wrap=True, min_width=4)
        for title in columns:
            made.add_column(title, justify="right", no_wrap=True, min_width=4)
        for cell in results.cells:
            if _heading(cell) == heading:
                made.add_row(cell.algorithm, cell.engine, *(of(cell) for of in columns.values()))
        yield made
    yield _LEGEND


def _heading(cell: Cell) -> str:
    if cell.distribution == "any":
        return f"{cell.size} coordinates"
    return f"{cell.size}, {100 * cell.density:g} % {cell.distribution}"


def digits(number: float) -> str:
    """Format a number with about three digits, and without decimals from 100 on."""
    if not number:
        return "0"
    decimals = 0 if number >= 100 else 1 if number >= 10 else 2 if number >= 1 else 3
    return f"{number:.{decimals}f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else digits(1000 * seconds)


_COLUMNS: dict[str, Callable[[Cell], str]] = {
    "time\nms": lambda cell: _ms(cell.median),
    "p95\nms": lambda cell: _ms(cell.seconds["p95"]),
    "sel.\nms": lambda cell: _ms(cell.phases["select"]),
    "enc.\nms": lambda cell: _ms(cell.phases["encode"]),
    "exch.\nms": lambda cell: _ms(cell.phases["exchange"]),
    "red.\nms": lambda cell: _ms(cell.phases["reduce"]),
    "sent\nMB": lambda cell: digits(cell.bytes / 1e6),
    "wire\n%": lambda cell: "" if cell.wire_share is None else f"{100 * cell.wire_share:.0f}",
    "\n×": lambda cell: "" if cell.speedup is None else digits(cell.speedup),
    "#\nwrong": lambda cell: f"[red]{cell.wrong}[/red]" if cell.wrong else "0",
    "predicted\nms": lambda cell: _ms(cell.predicted),
}
"""The columns of a table, of numbers; the last one only where something was predicted."""


def summary(results: Results) -> str:
    """Name the fastest rows for each size, density and distribution."""
    lines = []
    headings = dict.fromkeys(_heading(c) for c in results.cells if c.distribution != "any")
    for heading in headings:
        cells = [
            cell
            for cell in results.cells
            if _heading(cell) == heading and cell.algorithm != AS_MANY_BYTES and not cell.wrong
        ]
        for kind, rows in (
            ("exchange", [c for c in cells if not c.algorithm.startswith(STEP)]),
            ("whole step", [c for c in cells if c.algorithm.startswith(STEP)]),
        ):
            if rows:
                best = min(rows, key=lambda cell: cell.median)
                gain = "" if best.speedup is None else f", {best.speedup:.1f}× dense fp32"
                time = digits(1000 * best.median)
                lines.append(
                    f"{heading}: fastest {kind} {best.algorithm} on {best.engine}, {time} ms{gain}"
                )
    wrong = [cell for cell in results.cells if cell.wrong]
    if wrong:
        lines.append(f"{len(wrong)} of {len(results.cells)} results were wrong: see the table")
    return "\n".join(lines)


_CLOSE = 0.25
"""How far a prediction that counts as close is from the measured time."""


def verdict(cells: Sequence[Cell]) -> str:
    """Say how many predictions are close and how good their choices are; empty without any."""
    ratios = [cell.predicted / cell.median for cell in cells if cell.predicted is not None]
    if not ratios:
        return ""
    close = sum(abs(ratio - 1) <= _CLOSE for ratio in ratios)
    told = f"{close} of {len(ratios)} predictions within {100 * _CLOSE:.0f} % of the measured time"
    cases: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.predicted is not None and cell.algorithm in ALGORITHMS:
            key = (cell.engine, cell.size, cell.density, cell.distribution)
            cases[key].append(cell)
    regrets = [
        min(case, key=lambda cell: cell.predicted or 0.0).median / min(c.median for c in case)
        for case in cases.values()
        if len(case) > 1
    ]
    if regrets:
        told += (
            "; the sum predicted to be the fastest took at most"
            f" {max(regrets):.2f}× the time of the fastest"
        )
    return told
