"""The tables of docs/how-to/data.md, from the records of `cache.py` and `parts.py`.

python -m benchmarks.data.report
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.pages.tables import apart, over_seeds, table
from benchmarks.record import RESULTS, Row, rows_of

COLUMNS = (
    *("network", "set", "work", "loader", "threads", "no cache", "first epoch"),
    *("second epoch", "× no cache", "second run, first epoch"),
)
PARTS_COLUMNS = ("task", "parts", "seeds", "accuracy", "over full")


def cache_table(rows: list[Row]) -> Iterator[str]:
    """Yield the table of reading and training; times of an epoch."""
    yield from table(COLUMNS, map(_cells, rows))


def _cells(row: Row) -> Iterator[str]:
    plain, later = min(row["plain_s"]), min(row["cached_s"][1:])
    yield from (f"{row[name]}" for name in COLUMNS[:5])
    yield from (f"{seconds:.2f} s" for seconds in (plain, row["cached_s"][0], later))
    yield from (f"{plain / later:.1f}", f"{row['second_run_s'][0]:.2f} s")


def stored_table(rows: list[Row]) -> Iterator[str]:
    """Yield the table of what the sets take, and what the link gave."""
    columns = ("network", "set", "images", "request", "rate", "memory", "disk")
    firsts = {(row["network"], row["set"]): row for row in reversed(rows)}
    yield from table(
        columns,
        (
            (
                *(f"{row[name]}" for name in columns[:3]),
                f"{row['request_ms']:.2f} ms",
                f"{row['mbit_s']:.0f} Mbit/s",
                f"{row['memory_bytes'] / 1e6:.1f} MB",
                f"{row['disk_bytes'] / 1e6:.1f} MB",
            )
            for row in reversed(firsts.values())
        ),
    )


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
    for made, rows in ((stored_table, cache), (cache_table, cache), (parts_table, parts)):
        if rows:
            yield from made(rows)
            yield ""


if __name__ == "__main__":
    print("\n".join(all_tables()))
