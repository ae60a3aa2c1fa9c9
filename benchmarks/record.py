"""A record of runs that take minutes each: they run in processes, and none is repeated."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from benchmarks.rules import is_todays

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a record, none if there is no such file."""
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def shown_of(name: str) -> list[Row]:
    """Return the rows of a record that pages show: those of rules that have not changed since."""
    return [row for row in rows_of(RESULTS / f"{name}.json") if is_todays(row)]


def left_of(path: Path, jobs: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of a record, and the jobs of which no row of today's rules has all values."""
    rows = rows_of(path)
    done = [row for row in rows if is_todays(row)]
    return rows, [job for job in jobs if not any(job.items() <= row.items() for row in done)]


def origin_of(data: Path | None) -> Row:
    """Return what `machine` does, without the path of the data."""
    origin = machine()
    return {**origin, "command": origin["command"].replace(str(data), "DATA")}


def write(path: Path, origin: Row, rows: Any) -> None:
    """Write a record; ``origin`` is what `machine` returned."""
    document = {**origin, "rows": rows}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def show(rows: Iterable[Row]) -> None:
    """Print rows as a table: what of them is a number or a text."""
    rows = list(rows)
    names = [name for name, value in rows[0].items() if not isinstance(value, list | dict)]
    shown = Table(*names)
    for row in rows:
        shown.add_row(*(_text(row.get(name)) for name in names))
    Console(highlight=False, width=160).print(shown)


def _text(figure: Any) -> str:
    if isinstance(figure, float):
        return f"{figure:.4g}" if abs(figure) < 1000 else f"{figure:,.0f}"
    return "" if figure is None else str(figure)


def network() -> Row:
    """Return what the lab tells of its network."""
    return {
        name.removeprefix("SPARCEL_LAB_").lower(): value
        for name, value in os.environ.items()
        if name.startswith("SPARCEL_LAB_")
    }


def parser_for(description: str | None, record: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of what `run_all` is told."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="folder that holds the tasks' folders")
    parser.add_argument("--processes", type=int, help="runs at a time; default: a run on each core")
    parser.add_argument("--output", type=Path, default=record and RESULTS / f"{record}.json")
    return parser


def extend(
    path: Path, work: Callable[..., Row], data: Path, jobs: Iterable[Row], processes: int | None
) -> Iterator[Row]:
    """Call ``work(data, **job)`` for each job that the record lacks, and yield rows as they come.

    A row has all values of its job, and the minutes that it took. ``processes`` is the number of
    runs at a time; None for one on each core.
    """
    (rows, left), origin = left_of(path, jobs), origin_of(data)
    print(f"{len(left)} runs to do, {len(rows)} recorded", flush=True)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        runs = [pool.submit(_run, work, data.resolve(), job) for job in left]
        for run in as_completed(runs):
            rows.append({**run.result(), "commit": origin["commit"], "date": origin["date"]})
            write(path, origin, rows)
            yield rows[-1]


def _run(work: Callable[..., Row], data: Path, job: Row) -> Row:
    start = time.perf_counter()
    row = {**job, **work(data, **job)}
    return {**row, "minutes": round((time.perf_counter() - start) / 60, 2)}


def run_all(told: argparse.Namespace, work: Callable[..., Row], jobs: Iterable[Row]) -> None:
    """Extend a record by what `parser_for` was told, and print what of each row is short."""
    for row in extend(told.output, work, told.data, jobs, told.processes):
        short = {k: _text(v) for k, v in row.items() if not isinstance(v, list | dict)}
        print(*(f"{name} {text}" for name, text in short.items()), sep=", ", flush=True)
