"""The tables of docs/records/linear.md on one process: epochs, whole fits, reading."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.pages.tables import table
from benchmarks.record import Row


def single_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of one process: epochs beside scikit-learn and Vowpal Wabbit."""
    own = [row for row in rows if "accuracy" in row]
    names = dict.fromkeys(row["contender"] for row in own)
    left_out = ("l2 1e-07", "batch 8000", "batch 1000, l2 0, 2 threads")
    cells = []
    for name in names:
        if any(part in name for part in left_out):
            continue
        turns = [row for row in own if row["contender"] == name]
        epochs = [np.median(row["seconds"]) for row in turns]
        each = np.array(epochs) / turns[0]["entries"] * 1e9
        before = float(np.median([row["before_s"] for row in turns]))
        cells.append(
            (
                name,
                f"{np.median(epochs):.3f} s",
                f"{np.median(each):.1f}",
                f"{before:.2f} s",
                f"{100 * turns[0]['accuracy'][-1]:.2f} %",
            )
        )
    yield from table(("contender", "epoch", "ns an entry", "before", "accuracy after 5"), cells)


def fit_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of whole fits, in seconds of the processor."""
    columns = ("contender", "processor", "accuracy")
    cells = (
        (
            name,
            f"{min(own['cpu_seconds'] for own in turns):.2f} s",
            f"{100 * turns[0]['accuracy']:.2f} %",
        )
        for name, turns in _by_contender(rows)
    )
    yield from table(columns, cells)


def reading_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of ways to read rows, in seconds of the processor."""
    columns = ("reading", "file", "processor", "an entry")
    cells = []
    for name, turns in _by_contender(rows):
        least = min(own["cpu_seconds"] for own in turns)
        size, entries = turns[0]["bytes"], turns[0]["entries"]
        each = least / entries * 1e9
        cells.append((name, f"{size / 1e6:.0f} MB", f"{least:.2f} s", f"{each:.0f} ns"))
    yield from table(columns, cells)


def _by_contender(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for name in dict.fromkeys(row["contender"] for row in rows):
        yield name, [row for row in rows if row["contender"] == name]
