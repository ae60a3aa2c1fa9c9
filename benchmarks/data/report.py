"""The tables of docs/how-to/data.md, from the records of `cache.py` and `parts.py`.

python -m benchmarks.data.report
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.pages.tables import apart, over_seeds, table
from benchmarks.record import RESULTS, Row, rows_of

PARTS_COLUMNS = ("task", "parts", "seeds", "accuracy", "over full")
LOADER = "2 forked, persistent"
"""Of the rows that the page has."""


def cache_table(rows: list[Row]) -> Iterator[str]:
    """Yield the table of epochs that read or train, without a cache and with a full one."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["loader"] == LOADER:
            times = f"{min(row['plain_s']):.2f}", f"{min(row['cached_s'][1:]):.2f}"
            cells.setdefault((row["network"], row["set"]), []).extend(times)
    columns = ("network", "set", "reading", "cached", "training", "cached")
    yield from table(columns, ((*place, *own) for place, own in cells.items()))


def parts_table(rows: list[Row]) -> Iterator[str]:
    """Yield the table of accuracies beside those of the whole set with the same seed."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault((row["task"], row["parts"]), {})[row["seed"]] = 100 * row["accuracy"]

    def beside(task: str, parts: str, own: dict[int, float]) -> str:
        if parts == "full":
            return apart([*own.values()], 2)
        full = found[task, "full"]
        return over_seeds([points - full[seed] for seed, points in own.items()], 2)

    yield from table(
        PARTS_COLUMNS,
        (
            (task, parts, f"{len(own)}", f"{mean(own.values()):.1f}%", beside(task, parts, own))
            for (task, parts), own in found.items()
        ),
    )


def all_tables() -> Iterator[str]:
    cache, parts = (rows_of(RESULTS / f"data_{name}.json") for name in ("cache", "parts"))
    for made, rows in ((cache_table, cache), (parts_table, parts)):
        if rows:
            yield from made(rows)
            yield ""


if __name__ == "__main__":
    print("\n".join(all_tables()))
