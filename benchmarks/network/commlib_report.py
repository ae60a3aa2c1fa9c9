"""The tables of docs/records/commlib.md, from the record of `commlib.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

from benchmarks.network.commlib import PARTS
from benchmarks.pages.tables import over_seeds, table
from benchmarks.record import Row, rows_of

TARGETS = (0.55, 0.60)
"""The accuracies to which the trainings' times are told."""

SYSTEMS = ("Dense-SGD", "2DTAR-SGD", "MSTopK-SGD")
PAPER_TABLE_2 = {"2DTAR-SGD": 93.31, "TopK-SGD": 92.68, "MSTopK-SGD": 93.12}
"""Top-5 accuracy of ResNet-50, in percent."""
PAPER_TABLE_3 = {12: (20.1, 56.7, 70.5), 28: (43.5, 91.4, 90.6)}
"""Scaling efficiency of each system with ResNet-50 at 96 and 224 pixels, in percent."""


def of_kind(rows: Sequence[Row], kind: str) -> dict[str, Row]:
    """Return the rows of a kind by label; those of seed 0."""
    return {row["label"]: row for row in rows if row["kind"] == kind and row["seed"] == 0}


def warm(row: Row, resolution: int) -> list[Row]:
    """Return the epochs at a resolution whose images have been read before, if there are any.

    Parts are exchanged every fourth epoch, and the first epoch reads all of them.
    """
    own = [one for one in row["epochs"] if one["resolution"] == resolution]
    return [one for one in own if one["epoch"] % 4] or own


def step_parts(epochs: Sequence[Row]) -> dict[str, float]:
    """Return the milliseconds that a mean step of some epochs spent in each part."""
    steps = sum(one["steps"] for one in epochs)
    return {part: 1e3 * sum(one["parts"][part] for one in epochs) / steps for part in PARTS}


def rate(epochs: Sequence[Row]) -> float:
    """Return the images a second of all ranks in some epochs."""
    return sum(one["images"] for one in epochs) / sum(one["seconds"] for one in epochs)


def scaling_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of CommLib's Table 3: scaling efficiency, the paper's in brackets."""
    found = of_kind(rows, "throughput")

    def cells(size: int, paper: Sequence[float]) -> Iterator[str]:
        alone = rate(warm(found["alone"], size))
        yield str(size)
        for name, theirs in zip(SYSTEMS, paper, strict=True):
            yield f"{rate(warm(found[name], size)) / alone:.0%} ({theirs}%)"

    return table(("pixels", *SYSTEMS), (cells(*row) for row in PAPER_TABLE_3.items()))


def seconds_to(row: Row, accuracy: float) -> float | None:
    """Return the training's seconds until an epoch ends at an accuracy; None if none does."""
    seconds = 0.0
    for one in row["epochs"]:
        seconds += one["seconds"]
        if one["accuracy"] >= accuracy:
            return seconds
    return None


def target_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of CommLib's Table 5: seconds to an accuracy, part by part."""
    found = of_kind(rows, "training")
    base = [seconds_to(found["DDP"], target) for target in TARGETS]

    def cells(name: str, row: Row) -> Iterator[str]:
        yield name
        for target, first in zip(TARGETS, base, strict=True):
            own = seconds_to(row, target)
            yield "not reached" if own is None else f"{own:.0f} s"
            yield f"{first / own:.2f}×" if own and first else ""
        whole, theirs = (sum(one["seconds"] for one in of["epochs"]) for of in (row, found["DDP"]))
        yield from (f"{whole:.0f} s", f"{theirs / whole:.2f}×")
        yield f"{row['epochs'][-1]['accuracy']:.1%}"
        received = row["epochs"][-1]["node_bytes"]["received"]
        yield f"{received / 1e9:.2f} GB"

    columns = [cell for target in TARGETS for cell in (f"to {target:.0%}", "× DDP")]
    yield from table(
        ("training", *columns, "28 epochs", "× DDP", "accuracy", "a node received"),
        (cells(name, row) for name, row in found.items()),
    )


def convergence_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of CommLib's Table 2: what a large batch ends at."""
    found = [row for row in rows if row["kind"] == "convergence"]
    base = {row["seed"]: last(row) for row in found if row["label"] == "2DTAR-SGD"}

    def cells(name: str) -> Iterator[str]:
        runs = [row for row in found if row["label"] == name]
        beside = [100 * (last(row) - base[row["seed"]]) for row in runs]
        yield from (name, str(len(runs)), f"{mean(map(last, runs)):.2%}")
        yield over_seeds(beside, 2) if any(beside) else ""
        theirs = PAPER_TABLE_2[name]
        yield f"{theirs:.2f} % ({theirs - PAPER_TABLE_2['2DTAR-SGD']:+.2f})"

    yield from table(
        ("system", "seeds", "accuracy", "points over 2DTAR-SGD", "paper's top-5"),
        (cells(name) for name in PAPER_TABLE_2),
    )


def last(row: Row) -> float:
    """Return the mean accuracy after the last three epochs, which differ by chance."""
    return mean(one["accuracy"] for one in row["epochs"][-3:])


def recorded() -> list[Row]:
    """Return the latest row of each job in the record."""
    rows = rows_of("commlib")
    return [*{(row["kind"], row["label"], row["seed"]): row for row in rows}.values()]


def tables() -> Iterator[str]:
    """Yield the lines of all tables."""
    for lines in (scaling_table, target_table, convergence_table):
        yield from lines(recorded())
