"""The tables and the figures of docs/records/commlib.md, from the record of `commlib.py`.

python -m benchmarks.network.commlib_report
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import mean

from benchmarks.network.commlib import PARTS
from benchmarks.pages.tables import BESIDE, over_seeds, save, subplots, table
from benchmarks.record import RESULTS, Row, rows_of

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
    rows = rows_of(RESULTS / "commlib.json")
    return [*{(row["kind"], row["label"], row["seed"]): row for row in rows}.values()]


def tables() -> Iterator[str]:
    """Yield the lines of all tables, an empty one between two."""
    rows = recorded()
    yield from (*scaling_table(rows), "")
    yield from (*target_table(rows), "")
    yield from convergence_table(rows)


def draw_breakdown(rows: Sequence[Row]) -> None:
    """Draw stacked bars, as CommLib's Figure 1: systems side by side at each resolution."""
    systems = [*of_kind(rows, "existing").values(), *of_kind(rows, "throughput").values()]
    names = [f"{row['label']}{'' if row['kind'] == 'existing' else ', ours'}" for row in systems]
    figure, all_axes = subplots(1, len(PAPER_TABLE_3), size=(6.4, 4.4), sharey=True)
    for axes, size in zip(all_axes, PAPER_TABLE_3, strict=True):
        below = [0.0] * len(systems)
        parts = [step_parts(warm(row, size)) for row in systems]
        for part in PARTS:
            heights = [one[part] for one in parts]
            axes.bar(names, heights, bottom=below, label=part)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        axes.set(title=f"{size} × {size} pixels")
        axes.tick_params("x", rotation=90)
    all_axes[0].set(ylabel="ms a step")
    all_axes[-1].legend()
    save(figure, "commlib_breakdown")


def draw_accuracy(rows: Sequence[Row]) -> None:
    """Draw the trainings' accuracy by seconds."""
    figure, axes = subplots()
    for label, row in of_kind(rows, "training").items():
        seconds = list(accumulate(one["seconds"] for one in row["epochs"]))
        axes.plot(seconds, [100 * one["accuracy"] for one in row["epochs"]], label=label, lw=1)
    axes.set(xlabel="seconds", ylabel="accuracy, %")
    axes.legend(**BESIDE)
    save(figure, "commlib_training")


def draw_all() -> None:
    """Draw the figures."""
    draw_breakdown(recorded())
    draw_accuracy(recorded())


if __name__ == "__main__":
    print("\n".join(tables()))
    draw_all()
