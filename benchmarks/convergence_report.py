"""Tables and plots of docs/experiments.md, from the records of `causes.py` and `convergence.py`.

    python benchmarks/convergence_report.py

prints the tables as Markdown and draws ``docs/figures/convergence_TASK.svg``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

Row = dict[str, Any]

ROOT = Path(__file__).parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"


def rows_of(name: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def causes_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table with the means over seeds of each variant."""
    yield "| variant | seeds | accuracy | loss | dead units | early update | wait | density |"
    yield "|---|---|---|---|---|---|---|---|"
    for variant, runs in _grouped(rows, "variant"):
        cells = (
            variant,
            str(len(runs)),
            _mean(runs, "accuracy", "{:.2%}"),
            _mean(runs, "loss", "{:.4f}"),
            _mean(runs, "dead_units", "{:.0%}"),
            _mean(runs, "update_norm_first_tenth", "{:.2f}"),
            _mean(runs, "wait_steps", "{:.0f}"),
            _mean(runs, "mean_density", "{:.1%}"),
        )
        yield f"| {' | '.join(cells)} |"


def suite_table(rows: Sequence[Row], task: str) -> Iterator[str]:
    """Yield the lines of a task's table: each method beside dense training with the same seed."""
    of_task = [row for row in rows if row["task"] == task]
    dense = {row["seed"]: row for row in of_task if row["method"] == "dense"}
    yield "| method | seeds | accuracy | over dense | loss | over dense | sent | bytes |"
    yield "|---|---|---|---|---|---|---|---|"
    for method, runs in _grouped(of_task, "method"):
        pairs = [(run, dense[run["seed"]]) for run in runs if run["seed"] in dense]
        points = [100 * (run["accuracy"] - base["accuracy"]) for run, base in pairs]
        losses = [run["loss"] - base["loss"] for run, base in pairs if run["loss"] is not None]
        volume = mean(run["bytes_a_step"] / base["bytes_a_step"] for run, base in pairs)
        others = method != "dense"
        cells = (
            method,
            str(len(runs)),
            _mean(runs, "accuracy", "{:.2%}"),
            _interval(points, 2) if others else "",
            _mean(runs, "loss", "{:.4f}"),
            _interval(losses, 4) if others and len(losses) == len(pairs) else "",
            _mean(runs, "density_before", "{:.1%}"),
            f"{volume:.1%}",
        )
        yield f"| {' | '.join(cells)} |"


def draw(rows: Sequence[Row], task: str) -> None:
    """Draw the training loss of each method with seed 0."""
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "sparcel"
    figure, axes = plt.subplots(figsize=(7, 4))
    for row in rows:
        if row["task"] == task and row["seed"] == 0 and ", " not in row["method"]:
            losses = row["train_losses"]
            steps = [row["steps"] * (place + 0.5) / len(losses) for place in range(len(losses))]
            width = 2.0 if row["method"] == "dense" else 1.0
            values = [float("nan") if loss is None else loss for loss in losses]
            axes.plot(steps, values, label=row["method"], linewidth=width)
    axes.set(xlabel="step", ylabel="training loss", title=task, yscale="log")
    axes.legend(fontsize="small")
    figure.savefig(FIGURES / f"convergence_{task}.svg", metadata={"Date": None})
    plt.close(figure)


def _grouped(rows: Iterable[Row], key: str) -> Iterator[tuple[str, list[Row]]]:
    """Group rows by a value, in the order in which the values appear first."""
    order: dict[str, int] = {}
    rows = list(rows)
    for row in rows:
        order.setdefault(row[key], len(order))
    ordered = sorted(rows, key=lambda row: (order[row[key]], row["seed"]))
    for value, members in groupby(ordered, key=lambda row: str(row[key])):
        yield value, list(members)


def _mean(rows: Sequence[Row], key: str, form: str) -> str:
    values = [row[key] for row in rows]
    return "diverged" if None in values else form.format(mean(values))


def _interval(differences: Sequence[float], digits: int) -> str:
    """Return the mean of paired differences with its 95 % interval, if there are several."""
    middle = f"{mean(differences):+.{digits}f}"
    if len(differences) < 2:
        return middle
    count = len(differences)
    half = float(student.ppf(0.975, count - 1)) * stdev(differences) / count**0.5
    return f"{middle} ± {half:.{digits}f}"


def main() -> None:
    print("\n".join(causes_table(rows_of("causes"))), end="\n\n")
    rows = rows_of("convergence")
    for task, _ in _grouped((row for row in rows if row["method"] != "dense"), "task"):
        print(f"### {task}\n")
        print("\n".join(suite_table(rows, task)), end="\n\n")
        draw(rows, task)


if __name__ == "__main__":
    main()
