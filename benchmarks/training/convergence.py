"""What training with each scheme ends at, beside dense training, on real tasks.

    python -m benchmarks.training.convergence DATA [--tasks words] [--methods topk] [--seeds 3]

``DATA`` holds a folder for each task, see `tasks.TASKS`. Eight ranks of a simulated cluster train:
the collectives and the bytes are real, the network is not. Runs that the record has already are not
repeated, so the suite can be stopped and started again. ``--causes`` switches off one protection at
a time. ``--density``, ``--batch`` and ``--ranks`` replace what the suite has; they,
and tasks that are not judged, write to a record of their own. With another batch as many samples
are seen, in other numbers of steps, and the learning rate grows with the root of the batch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.pages.tables import over_seeds, perplexity, points, table
from benchmarks.record import RESULTS, Row, among, grouped, run_all, runs_told
from benchmarks.streams.paper_selectors import GaussianK
from benchmarks.training.frontier_report import over_dense
from benchmarks.training.task_training import Method, train
from benchmarks.training.tasks import TASKS

NODES = {"ranks_per_node": 4}
RANKS, DENSITY = 8, 0.01

SUITE = ("words", "characters", "images", "speech", "intents")
"""The tasks that are judged."""

METHODS = (
    Method("dense", "dense"),
    Method("topk", "topk"),
    Method("gtopk", "gtopk"),
    Method("oktopk", "oktopk"),
    Method("scalecom", "scalecom"),
    Method("hitopk 2×4", "hitopk", NODES),
    Method("mstopk", "mstopk"),
    Method("gaussiank", "topk", {"selector": GaussianK(), "algorithm": "allgather"}),
    Method("dgc", "dgc", {"density": 0.01}),
    Method("gtopk put_back=own", "gtopk", {"put_back": "own"}),
    Method("oktopk put_back=own", "oktopk", {"put_back": "own"}),
    Method("oktopk reuse", "oktopk", {"threshold": "reuse"}),
    Method("scalecom β=0.1", "scalecom", {"beta": 0.1}),
    Method("sparcml 4 bits", "sparcml", {"bits": 4}),
    Method("sparcml bucketed", "sparcml", {"selector": "bucketed"}),
    Method("sparcml bucketed 4 bits", "sparcml", {"selector": "bucketed", "bits": 4}),
    Method("topk 0.1 %", "topk", {"density": 0.001}),
    Method("oktopk 0.1 %", "oktopk", {"density": 0.001}),
)

JUDGED = ("topk", "gtopk", "oktopk", "scalecom")

CAUSES = tuple(
    replace(method, label=f"{method.label}, {label}", ahead=ahead, frontload=frontload)
    for method in METHODS
    if method.label in JUDGED
    for label, ahead, frontload in (
        ("constant density", True, False),
        ("not ahead", False, True),
        ("unprotected", False, False),
    )
)


BY_LABEL = {method.label: method for method in (*METHODS, *CAUSES)}


def trained(data: Path, method: str, density: float, **run: Any) -> Row:
    """Train once with a method at a density, and return its row."""
    chosen = BY_LABEL[method]
    if chosen.scheme != "dense":
        chosen = replace(chosen, settings={**chosen.settings, "density": density})
    return train(data, method=chosen, **run)


def suite_table(rows: list[Row]) -> Iterator[str]:
    """Return the lines of what sparcel's methods ended at over dense training, same seeds."""
    dense = {(row["task"], row["seed"]): row for row in rows if row["method"] == "dense"}
    of_words = {row["method"] for row in rows if row["task"] == "words"} - {"dense", "gaussiank"}
    runs = grouped((row for row in rows if row["method"] in of_words), "method")
    columns = "method", "bytes of words", *SUITE
    return table(columns, ([method, *_ends(found, dense)] for method, found in runs.items()))


def _ends(runs: list[Row], dense: dict[tuple[str, int], Row]) -> Iterator[str]:
    pairs = {
        task: [(run, dense[task, run["seed"]]) for run in runs if run["task"] == task]
        for task in SUITE
    }
    yield f"{mean(run['bytes_a_step'] / base['bytes_a_step'] for run, base in pairs['words']):.1%}"
    yield from (over_dense(task, pairs[task]) for task in SUITE)


def sweeps_table(sweeps: list[Row], suite: list[Row]) -> Iterator[str]:
    """Return the lines of the runs with other densities, batches and numbers of ranks."""
    dense = {_setting(row): row for row in (*suite, *sweeps) if row["method"] == "dense"}
    others = [
        row
        for row in sweeps
        if row["task"] in SUITE and row["method"] in BY_LABEL and row["method"] != "dense"
    ]
    others.sort(key=lambda row: (_setting(row), row["density_before"]))
    columns = "task", "method", "ranks", "batch", "asked", "accuracy", "perplexity"
    return table(columns, (_sweep(row, dense[_setting(row)]) for row in others))


def _sweep(row: Row, base: Row) -> Iterator[str]:
    yield from (row["task"], row["method"])
    yield from (str(row[key]) for key in ("ranks", "batch"))
    yield f"{row['density']:.1%}"
    yield from (
        over_seeds(points([(row, base)]), 2),
        f"{over_seeds(perplexity([(row, base)]), 1)} %",
    )


def _setting(row: Row) -> tuple[str, int, int, int]:
    return row["task"], row["ranks"], row["batch"], row["seed"]


def main() -> None:
    told = runs_told(
        __doc__,
        tasks=among(TASKS, SUITE),
        methods={"nargs": "+", "choices": BY_LABEL, "metavar": "LABEL"},
        seeds=3,
        causes=False,
        density=float,
        batch=int,
        ranks=RANKS,
    )
    usual = told.ranks == RANKS and set(told.tasks) <= set(SUITE)
    sweep = told.density or told.batch or not usual
    name = "convergence_sweeps" if sweep else "convergence"
    told.output = told.output or RESULTS / f"{name}.json"
    run_all(told, trained, _jobs(told))


def _jobs(told: argparse.Namespace) -> Iterator[Row]:
    """Yield the runs, one seed of everything before the next."""
    labels = told.methods or [method.label for method in (CAUSES if told.causes else METHODS)]
    for seed, label, task in product(range(told.seeds), labels, told.tasks):
        method, usual = BY_LABEL[label], TASKS[task]
        batch = told.batch or usual.batch
        asked = told.density or method.settings.get("density", DENSITY)
        yield {
            "task": task,
            "method": label,
            "seed": seed,
            "ranks": told.ranks,
            "batch": batch,
            "lr": usual.lr * math.sqrt(batch / usual.batch),
            "density": 1.0 if method.scheme == "dense" else asked,
        }


if __name__ == "__main__":
    main()
