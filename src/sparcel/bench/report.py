"""What is shown: progress, the table, and what it amounts to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sparcel.bench.phases import PHASES
from sparcel.bench.results import Cell, Results

Show = Callable[[Cell | None], None]

_LEGEND = (
    "Times in ms, medians: the slowest rank's, and of it what an average rank spends on each phase. "
    "MB: sent or received by the busiest rank. wire: the time that these bytes need on the link "
    "alone, as a share. ×: how many times faster than dense fp32, the better engine's. #wrong: "
    "coordinates that are not what they should be."
)


@contextmanager
def progress(console: Console | None, cells: int) -> Iterator[Show]:
    """Show cells as they come: a bar on a terminal, lines elsewhere, nothing without a console."""
    if console is None:
        yield lambda cell: None
    elif not console.is_terminal:
        yield _lines(console, cells)
    else:
        columns = (TextColumn("{task.description:<60}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task("", total=cells)
            yield lambda cell: bar.update(task, advance=1, description=_line(cell))


def _lines(console: Console, cells: int) -> Show:
    done = 0

    def show(cell: Cell | None) -> None:
        nonlocal done
        done += 1
        if cell is not None:
            console.print(f"{done}/{cells}  {_line(cell)}", soft_wrap=True)

    return show


def _line(cell: Cell | None) -> str:
    if cell is None:
        return ""
    what = "" if cell.distribution == "any" else f" {100 * cell.density:g} % {cell.distribution}"
    return f"{cell.engine} {cell.algorithm} {cell.size}{what}: {1000 * cell.median:.3g} ms"


def table(results: Results) -> Table:
    """Return the cells as a table, one section a size, density and distribution."""
    network = results.network
    made = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=f"{results.world_size} ranks, {network['description']}",
        title_justify="left",
        caption=_LEGEND,
        caption_justify="left",
    )
    made.add_column("algorithm", no_wrap=True)
    made.add_column("engine", no_wrap=True)
    predicted = any(cell.predicted is not None for cell in results.cells)
    titles = ["time", "p95", *PHASES, "MB", "wire", "×", "#wrong"]
    for title in titles + ["predicted"] * predicted:
        made.add_column(title, justify="right")
    heading = ""
    for cell in results.cells:
        if (now := _heading(cell)) != heading:
            heading = now
            made.add_section()
            made.add_row(f"[bold]{heading}[/bold]")
        made.add_row(*_row(cell)[: len(titles) + 2 + predicted])
    return made


def _heading(cell: Cell) -> str:
    if cell.distribution == "any":
        return f"{cell.size} coordinates"
    return f"{cell.size}, {100 * cell.density:g} % {cell.distribution}"


def _row(cell: Cell) -> list[str]:
    times = [cell.median, cell.seconds["p95"], *(cell.phases[phase] for phase in PHASES)]
    return [
        cell.algorithm,
        cell.engine,
        *(_digits(1000 * seconds) for seconds in times),
        f"{cell.bytes / 1e6:.3f}",
        "" if cell.wire_share is None else f"{100 * cell.wire_share:.0f} %",
        "" if cell.speedup is None else f"{cell.speedup:.2f}",
        str(cell.wrong) if not cell.wrong else f"[red]{cell.wrong}[/red]",
        "" if cell.predicted is None else _digits(1000 * cell.predicted),
    ]


def _digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 1 else f"{number:.3f}"


def summary(results: Results) -> str:
    """Say what was fastest for each size, density and distribution."""
    lines = []
    headings = dict.fromkeys(_heading(c) for c in results.cells if c.distribution != "any")
    for heading in headings:
        cells = [cell for cell in results.cells if _heading(cell) == heading and not cell.wrong]
        for kind, rows in (
            ("exchange", [c for c in cells if not c.algorithm.startswith("step:")]),
            ("whole step", [c for c in cells if c.algorithm.startswith("step:")]),
        ):
            if rows:
                best = min(rows, key=lambda cell: cell.median)
                gain = "" if best.speedup is None else f", {best.speedup:.1f}× dense fp32"
                time = _digits(1000 * best.median)
                lines.append(
                    f"{heading}: fastest {kind} {best.algorithm} on {best.engine}, {time} ms{gain}"
                )
    wrong = [cell for cell in results.cells if cell.wrong]
    if wrong:
        lines.append(f"{len(wrong)} of {len(results.cells)} results were WRONG: see the table")
    return "\n".join(lines)
