"""The table of docs/how-to/schedule.md, from the record of ``flush.py``.

python -m benchmarks.training.flush_report
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import mean

from benchmarks.pages.tables import over_seeds, table
from benchmarks.record import RESULTS, Row, rows_of
from sparcel.training.flush import FLUSH_STEPS

COLUMNS = (
    *("task", "optimiser", "density", "switch at step", "memory is flushed", "seeds"),
    *("first update", "loss before", "loss after", "held-out loss", "over 16 steps", "accuracy"),
)
FLUSHED = {0: "never (forgotten)", 1: "at once"}


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the table: a row for each way to flush, means over seeds."""
    found: dict[tuple[object, ...], dict[int, list[Row]]] = {}
    for row in rows:
        setting = row["task"] != "images", row["task"], row["lars"], -row["density"], row["switch"]
        found.setdefault(setting, {}).setdefault(row["steps"], []).append(row)
    yield from table(
        COLUMNS,
        (
            _cells(runs, ways[FLUSH_STEPS])
            for _, ways in sorted(found.items())
            for _, runs in sorted(ways.items())
        ),
    )


def _cells(runs: list[Row], usual: list[Row]) -> Iterator[str]:
    """Yield the cells of runs with several seeds; ``usual`` are those that flush as we do."""
    first, losses = runs[0], {row["seed"]: row["loss"] for row in usual}
    over = [row["loss"] - losses[row["seed"]] for row in runs]
    yield from (first["task"], "LARS" if first["lars"] else "SGD")
    yield from (f"{first['density']:.1%}", f"{1000 * first['switch']:.0f}")
    yield from (FLUSHED.get(first["steps"], f"in {first['steps']} steps"), str(len(runs)))
    yield f"{mean(row['norms'][10] for row in runs):.2f}"
    yield from (
        f"{mean(mean(row['losses'][part]) for row in runs):.3f}"
        for part in (slice(10), slice(10, 20))
    )
    yield f"{mean(row['loss'] for row in runs):.4f}"
    yield "" if runs == usual else over_seeds(over, 4)
    yield f"{mean(row['accuracy'] for row in runs):.1%}"


if __name__ == "__main__":
    print("\n".join(lines(rows_of(RESULTS / "flush.json"))))
