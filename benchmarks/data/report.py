"""The figures of docs/how-to/data.md, from the records of `cache.py` and `parts.py`.

python -m benchmarks.data.report
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.pages.tables import table
from benchmarks.record import RESULTS, Row, rows_of

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


def parts_sentence(rows: list[Row]) -> str:
    """Return the accuracies of trainings that read parts, beside those of the whole set."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["parts"], []).append(100 * row["accuracy"])
    full, kept, every_4, every = (
        f"{mean(found[one]):.1f} %"
        for one in ("full", "kept", "exchanged every 4 epochs", "exchanged every epoch")
    )
    return (
        f"{full} with the full set, {kept} with kept parts, {every_4} with parts that are exchanged"
        f" every 4 epochs, and {every} with those exchanged in every epoch"
    )


def all_lines() -> Iterator[str]:
    yield from cache_table(rows_of(RESULTS / "data_cache.json"))
    yield parts_sentence(rows_of(RESULTS / "data_parts.json"))


if __name__ == "__main__":
    print("\n".join(all_lines()))
