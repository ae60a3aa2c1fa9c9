"""The tables and the figures of docs/explanation/commlib.md, from the record of `commlib.py`.

python -m benchmarks.network.commlib_report
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.network.commlib import PARTS
from benchmarks.pages.tables import BESIDE, over_seeds, save, subplots, table
from benchmarks.record import RESULTS, Row

Lines = Callable[[Sequence[Row]], Iterator[str]]

RECORD = RESULTS / "commlib.json"
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "commlib.md"

TARGETS = (0.55, 0.60)
"""The accuracies to which the trainings' times are told."""

SYSTEMS = ("Dense-SGD", "2DTAR-SGD", "MSTopK-SGD")
PAPER_TABLE_2 = {"2DTAR-SGD": 93.31, "TopK-SGD": 92.68, "MSTopK-SGD": 93.12}
"""Top-5 accuracy of ResNet-50, in percent."""
PAPER_TABLE_3 = {12: (20.1, 56.7, 70.5), 28: (43.5, 91.4, 90.6)}
"""Scaling efficiency of each system with ResNet-50 at 96 and 224 pixels, in percent."""
PAPER_TABLE_4 = {12: (96, 65), 16: (128, 70), 28: (224, 83), 32: (288, 80)}
"""The paper's resolution for each of ours, and its scaling efficiency in percent."""


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


def breakdown_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of CommLib's Figure 1: where the time of a step goes."""
    systems = {f"existing: {label}": row for label, row in of_kind(rows, "existing").items()}
    systems |= {f"ours: {label}": row for label, row in of_kind(rows, "throughput").items()}
    places = [(name, row, size) for size in PAPER_TABLE_4 for name, row in systems.items()]
    yield from table(
        ("pixels", "system", *(f"{part}, ms" for part in PARTS), "all", "images/s"),
        (_breakdown(str(size), name, warm(row, size)) for name, row, size in places),
    )


def _breakdown(*cells: object) -> Iterator[str]:
    *names, epochs = cells
    parts = step_parts(epochs)  # type: ignore[arg-type]
    yield from map(str, names)
    yield from (f"{part:.0f}" for part in parts.values())
    yield f"{sum(parts.values()):.0f}"
    yield f"{rate(epochs):,.0f}"  # type: ignore[arg-type]


def cache_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of CommLib's Figure 9: a step without and with DataCache."""
    found = of_kind(rows, "training")
    columns = ("training", "epoch", *(f"{part}, ms" for part in PARTS), "all", "images/s")
    names = ("DDP", "DDP, DataCache")
    yield from table(
        columns,
        (
            _breakdown(name, epoch, [found[name]["epochs"][epoch]])
            for name in names
            for epoch in (0, 1)
        ),
    )


def scaling_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of CommLib's Table 3: throughput and scaling efficiency."""
    found = of_kind(rows, "throughput")
    columns = [f"{name}{unit}" for name in SYSTEMS for unit in (", images/s", ", SE", ", paper's")]

    def cells(size: int, paper: Sequence[float]) -> Iterator[str]:
        alone = rate(warm(found["alone"], size))
        yield from (f"{size}", f"{alone:,.0f}")
        for name, theirs in zip(SYSTEMS, paper, strict=True):
            own = rate(warm(found[name], size))
            yield from (f"{own:,.0f}", f"{own / alone:.0%}", f"{theirs:.1f} %")

    yield from table(
        ("pixels", "without exchange, images/s", *columns),
        (cells(size, paper) for size, paper in PAPER_TABLE_3.items()),
    )


def resolutions_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of CommLib's Table 4: the schedule's phases."""
    whole = of_kind(rows, "training")["all three"]
    alone = of_kind(rows, "throughput")["alone"]

    def cells(size: int) -> Iterator[str]:
        phases = [one for one in whole["phases"] if one["resolution"] == size]
        theirs, efficiency = PAPER_TABLE_4[size]
        single, own = rate(warm(alone, size)), rate(warm(whole, size))
        yield f"{sum(one['length'] for one in phases):g}"
        yield f"{size}"
        yield phases[0]["scheme"]
        yield str(phases[0]["batch_size"])
        yield from (f"{single:,.0f}", f"{own:,.0f}", f"{own / single:.0%}")
        yield f"{efficiency} % at {theirs}"

    columns = (
        *("epochs", "pixels", "exchange", "batch of a rank", "without exchange, images/s"),
        *("images/s", "SE", "paper's SE"),
    )
    yield from table(columns, map(cells, PAPER_TABLE_4))


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


def shown(lines: Lines, *figure: str) -> Callable[[Row], Iterator[str]]:
    """Return what yields a table, and below it a figure with its description."""

    def of_record(record: Row) -> Iterator[str]:
        yield from lines(record["rows"])
        for name, description in zip(figure[::2], figure[1::2], strict=True):
            yield f"\n![{description}](../figures/{name}.svg)"

    return of_record


def page(text: str, record: Row) -> str:
    """Return the page made anew between ``<!-- NAME -->`` and ``<!-- end -->``; no record, no more.

    So the page has neither tables nor links to files that are not there before the first run.
    """
    for name, lines in REGIONS.items():
        head, _, rest = text.partition(f"<!-- {name} -->\n")
        tail = rest.partition("<!-- end -->")[2]
        made = "\n".join(("", *lines(record), "", "")) if record else ""
        text = f"{head}<!-- {name} -->\n{made}<!-- end -->{tail}"
    return text


def origin(record: Row) -> Iterator[str]:
    """Yield where and when the record was made, and how slow the store was."""
    firsts = [row["epochs"][0] for row in record["rows"]]  # of the first row it was not noted
    request = median(one["request_seconds"] for one in firsts if "request_seconds" in one)
    dates = sorted({row["date"][:10] for row in record["rows"]})
    yield (
        f"The [record](../../benchmarks/results/{RECORD.name}) is of {' and '.join(dates)}, of"
        f" {record['cores']} cores of {record['processor']}, with torch {record['torch']}. The"
        f" store answered in {1e3 * request:.0f} ms, the median over trainings."
    )


def recorded() -> Row:
    """Return the record, with the latest row of each job; empty if there is none."""
    if not RECORD.exists():
        return {}
    record: Row = json.loads(RECORD.read_text())
    latest = {(row["kind"], row["label"], row["seed"]): row for row in record["rows"]}
    return {**record, "rows": [*latest.values()]}


REGIONS = {
    "record": origin,
    "Figure 1": shown(breakdown_table, "commlib_breakdown", "time of a step by its parts"),
    "Figure 9": shown(cache_table),
    "Table 3": shown(scaling_table),
    "Table 4": shown(resolutions_table),
    "Table 5": shown(target_table, "commlib_training", "accuracy against time"),
    "Table 2": shown(convergence_table, "commlib_convergence", "accuracy at a large batch"),
}


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


def draw_accuracy(rows: Sequence[Row], kind: str, over_time: bool) -> None:
    """Draw accuracy by epochs, as CommLib's Figure 10, or by seconds."""
    figure, axes = subplots()
    for label, row in of_kind(rows, kind).items():
        seconds, places = 0.0, []
        for one in row["epochs"]:
            seconds += one["seconds"]
            places.append(seconds if over_time else one["epoch"] + 1)
        axes.plot(places, [100 * one["accuracy"] for one in row["epochs"]], label=label, lw=1)
    axes.set(xlabel="seconds" if over_time else "epochs", ylabel="accuracy, %")
    axes.legend(**BESIDE)
    save(figure, f"commlib_{kind}")


def draw_all() -> None:
    """Draw the figures."""
    rows = recorded()["rows"]
    draw_breakdown(rows)
    draw_accuracy(rows, "training", over_time=True)
    draw_accuracy(rows, "convergence", over_time=False)


def main() -> None:
    """Write the tables into the page, and draw the figures."""
    PAGE.write_text(page(PAGE.read_text(), recorded()))
    draw_all()


if __name__ == "__main__":
    main()
