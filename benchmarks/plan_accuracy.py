"""How close predictions are to measured times, and how good their choices are.

    python benchmarks/plan_accuracy.py BENCH.json RATES.json [--engine gloo] [--output FILE]

``sparcel bench --json`` writes ``BENCH.json``, and ``sparcel plan --measure --save`` writes
``RATES.json`` on the same network. For each case there are two choices: one among the lossless
sums, and one among the whole steps.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparcel.bench.inputs import Case
from sparcel.bench.predicted import predicted
from sparcel.collectives import ALGORITHMS
from sparcel.cost import Rates

NEAR, GOOD = 0.25, 1.15
"""`NEAR` is the largest error of a close prediction, as a share of the measured time. `GOOD` is the
largest ratio of a good choice's time to the best time."""


@dataclass(frozen=True)
class Cell:
    """One row of the benchmark, measured and predicted seconds."""

    engine: str
    where: tuple[int, float, str]
    algorithm: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Error of the prediction, as a share of the measured time."""
        return self.predicted / self.measured - 1

    @property
    def near(self) -> bool:
        """Whether the prediction is within a quarter."""
        return abs(self.error) <= NEAR


def read(bench: dict[str, Any], rates: Rates, engine: str) -> list[Cell]:
    """Return the cells of an engine that can be predicted."""
    cells = []
    cases: dict[tuple[int, float, str], Case] = {}
    for row in bench["cells"]:
        where = row["size"], row["density"], row["distribution"]
        if row["engine"] != engine or where[2] == "file":
            continue
        case = cases.setdefault(where, Case(*_drawn(where), bench["world_size"]))
        seconds = predicted(
            row["algorithm"], case, bench["network"].get("ranks_per_node") or 1, rates
        )
        if seconds is not None:
            cells.append(Cell(engine, where, row["algorithm"], row["seconds"]["median"], seconds))
    return cells


def _drawn(where: tuple[int, float, str]) -> tuple[int, float, str]:
    """Return a case with inputs: dense cells have no distribution, so they get a uniform one."""
    size, density, distribution = where
    return (size, density, distribution) if distribution != "any" else (size, 0.01, "uniform")


def choices(cells: Iterable[Cell]) -> list[tuple[Cell, float]]:
    """Return for each choice the cell chosen, and its time divided by the best time."""
    contests = defaultdict(list)
    for cell in cells:
        kind = "step" if cell.algorithm.startswith("step:") else "sum"
        if kind == "step" or cell.algorithm in ALGORITHMS:
            contests[cell.engine, cell.where, kind].append(cell)
    found = []
    for contest in contests.values():
        chosen = min(contest, key=lambda cell: cell.predicted)
        found.append((chosen, chosen.measured / min(cell.measured for cell in contest)))
    return found


def report(cells: list[Cell]) -> dict[str, Any]:
    """Return the figures of the record."""
    chosen = choices(cells)
    return {
        "cells": len(cells),
        "within 25 %": sum(cell.near for cell in cells) / len(cells),
        "choices": len(chosen),
        "within 1.15 of the best": sum(ratio <= GOOD for _, ratio in chosen) / len(chosen),
        "errors": [
            {
                "engine": cell.engine,
                "size": cell.where[0],
                "density": cell.where[1],
                "distribution": cell.where[2],
                "algorithm": cell.algorithm,
                "measured": cell.measured,
                "predicted": cell.predicted,
            }
            for cell in cells
        ],
    }


def main() -> None:
    """Read the files, print the errors, and write them to ``--output`` if it is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bench", type=Path)
    parser.add_argument("rates", type=Path)
    parser.add_argument("--engine", default="gloo")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    bench = json.loads(arguments.bench.read_text())
    cells = read(bench, Rates.from_json(arguments.rates.read_text()), arguments.engine)
    for cell in cells:
        size, density, distribution = cell.where
        print(
            f"{cell.algorithm:20} {size:>10} {100 * density:>8.3g} % {distribution:10}"
            f" measured {1e3 * cell.measured:9.3f} ms  predicted {1e3 * cell.predicted:9.3f} ms"
            f"  {100 * cell.error:+6.1f} %{'' if cell.near else ' *'}"
        )
    for cell, ratio in choices(cells):
        print(f"chosen for {cell.where}: {cell.algorithm}, {ratio:.2f} times the best one's time")
    summary = report(cells)
    print(
        f"{100 * summary['within 25 %']:.0f} % of {summary['cells']} cells within 25 %,"
        f" {100 * summary['within 1.15 of the best']:.0f} % of {summary['choices']} choices within"
        " 1.15 of the best"
    )
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
