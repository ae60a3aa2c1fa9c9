"""Shows a run: its progress, the tables, and a summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sparcel.tools.bench.contenders import AS_MANY_BYTES, STEP
from sparcel.tools.bench.results import Cell, Results

Show = Callable[[Cell | None], None]

_WIDTH = 100
_LEGEND = """
time: of the slowest rank, median over iterations. sel., enc., exch., red.: time of an average rank
for selecting, encoding and decoding, exchanging, reducing. sent: bytes that the busiest rank sent
or received. wire: time that these bytes alone need on the link, as a share of the time. ×: speed-up
over dense fp32 on the faster engine. wrong: number of wrong coordinates."""


def console() -> Console:
    """Return the console of a run; if it is no terminal, it is at least as wide as the tables."""
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
        columns = (TextColumn("{task.description:<60}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task("", total=cells)
            yield lambda cell: bar.update(task, advance=1, description=_line(cell))


def _line(cell: Cell | None) -> str:
    if cell is None:
        return ""
    what = "" if cell.distribution == "any" else f" {100 * cell.density:g} % {cell.distribution}"
    return f"{cell.engine} {cell.algorithm} {cell.size}{what}: {digits(1000 * cell.median)} ms"


def tables(results: Results) -> Iterator[Table | str]:
    """Yield the cells as tables, one for each size, density and distribution, and a legend."""
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
