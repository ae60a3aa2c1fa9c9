"""The table of docs/schedule.md, from the record of ``flush.py``.

python benchmarks/flush_report.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import mean

from pages import table
from record import RESULTS, Row, rows_of

COLUMNS = (
    "task",
    "density",
    "switch at step",
    "memory is flushed",
    "first update",
    "loss before",
    "loss after",
    "held-out loss",
    "accuracy",
)
FLUSHED = {0: "never (forgotten)", 1: "at once"}


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the table: a row for each run."""
    ordered = sorted(
        rows, key=lambda row: (row["task"] != "images", row["task"], -row["density"], row["steps"])
    )
    yield from table(COLUMNS, map(_cells, ordered))


def _cells(row: Row) -> list[str]:
    steps, losses = row["steps"], row["losses"]
    return [
        row["task"],
        f"{100 * row['density']:g} %",
        f"{1000 * row['switch']:.0f}",
        FLUSHED.get(steps, f"in {steps} steps"),
        f"{row['norms'][10]:.2f}",
        f"{mean(losses[:10]):.3f}",
        f"{mean(losses[10:20]):.3f}",
        f"{row['loss']:.4f}",
        f"{100 * row['accuracy']:.1f} %",
    ]


if __name__ == "__main__":
    print("\n".join(lines(rows_of(RESULTS / "flush.json"))))
