"""A record of runs that take minutes each: they run in processes, and none is repeated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a record, none if there is no such file."""
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def write(path: Path, origin: Row, rows: list[Row]) -> None:
    """Write a record; ``origin`` is what `machine` returned."""
    document = {**origin, "rows": rows}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def extend(
    path: Path, work: Callable[..., Row], data: Path, jobs: Iterable[Row], processes: int | None
) -> Iterator[Row]:
    """Call ``work(data, **job)`` for each job that the record lacks, and yield rows as they come.

    A record has a job if one of its rows has all its values. ``processes`` is the number of runs
    at a time; None for one on each core.
    """
    rows, origin = rows_of(path), machine()
    origin["command"] = origin["command"].replace(str(data), "DATA")
    left = [job for job in jobs if not any(job.items() <= row.items() for row in rows)]
    print(f"{len(left)} runs to do, {len(rows)} recorded", flush=True)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        runs = [pool.submit(work, data.resolve(), **job) for job in left]
        for run in as_completed(runs):
            rows.append({**run.result(), "commit": origin["commit"], "date": origin["date"]})
            write(path, origin, rows)
            yield rows[-1]
