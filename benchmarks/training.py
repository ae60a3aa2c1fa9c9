"""Accuracy of each scheme in the same training, with the coordinates selected and bytes sent.

    python benchmarks/training.py FOLDER [--seeds 3] [--epochs 3] [--schemes topk oktopk]

``FOLDER`` holds the four IDX files of MNIST or Fashion-MNIST. A CNN is trained by 8 ranks of a
simulated cluster: the collectives and the bytes are real, the network is not. With all schemes the
results go to ``benchmarks/results/training_DATA.json``, or to ``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from cluster_training import Method, Plan, dataset, train
from models import small_cnn
from rich.console import Console
from rich.table import Table

METHODS = (
    Method("dense", "dense"),
    Method("topk", "topk"),
    Method("sparcml", "sparcml"),
    Method("gtopk", "gtopk", sums_k=True),
    Method("oktopk", "oktopk", sums_k=True),
    Method("oktopk reuse", "oktopk", {"threshold": "reuse"}, sums_k=True),
    Method("scalecom", "scalecom"),
    Method("scalecom β=0.1", "scalecom", {"beta": 0.1}),
    Method("hitopk 2×4", "hitopk", {"ranks_per_node": 4}),
    Method("mstopk", "mstopk"),
    Method("gaussiank", "gaussiank"),
    Method("dgc", "dgc"),
    Method("sparcml 4 bits", "sparcml", {"bits": 4}),
    Method("torus2d 2×4", "torus2d", {"ranks_per_node": 4}),
)


def _arguments() -> argparse.Namespace:
    defaults = Plan("")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the four IDX files")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0 on")
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--warmup-epochs", type=int, default=defaults.warmup_epochs)
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument("--schemes", nargs="+", metavar="NAME", help="rows to run; default: all")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    plan = Plan(
        str(arguments.data.resolve()),
        epochs=arguments.epochs,
        warmup_epochs=arguments.warmup_epochs,
        lr=arguments.lr,
    )
    name = dataset(plan.data).name
    methods = [m for m in METHODS if arguments.schemes is None or m.label in arguments.schemes]
    output = arguments.output
    if output is None and arguments.schemes is None:
        output = Path(__file__).parent / "results" / f"training_{name}.json"
    console, rows, origin = Console(highlight=False), [], provenance(plan, name)
    for row in runs(plan, methods, range(arguments.seeds), arguments.processes):
        rows.append(row)
        console.print(f"{row['method']}, seed {row['seed']}: {row['accuracy']:.2%}")
        summaries = summarise(methods, rows)
        if output is not None:  # save after every row, in case the run is interrupted
            document = {**origin, "summary": summaries, "rows": rows}
            output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    console.print(table(summaries))


def runs(
    plan: Plan, methods: Sequence[Method], seeds: Sequence[int], processes: int
) -> Iterator[dict[str, Any]]:
    """Train with every method and seed, and yield each row when it is done."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        jobs = [pool.submit(train, plan, method, seed) for seed in seeds for method in methods]
        for job in as_completed(jobs):
            yield job.result()


def summarise(methods: Sequence[Method], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the rows, and return the summary of each method's rows over its seeds."""
    labels = [method.label for method in methods]
    rows.sort(key=lambda row: (labels.index(row["method"]), row["seed"]))
    grouped = [list(group) for _, group in groupby(rows, key=lambda row: row["method"])]
    summaries = [over_all_seeds(group) for group in grouped]
    compare(summaries)
    return summaries


def over_all_seeds(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over a method's seeds, the maxima of the largest values, and the spread."""
    accuracies = [row["accuracy"] for row in rows]
    return {
        "method": rows[0]["method"],
        "seeds": len(rows),
        "accuracy": mean(accuracies),
        "accuracy_lowest": min(accuracies),
        "accuracy_highest": max(accuracies),
        **{key: over_seeds(key, [row[key] for row in rows]) for key in MEASURED},
    }


MEASURED = ("result_density", "selected", "result", "xi_mean", "xi_largest", "bytes_a_step")


def over_seeds(key: str, values: Sequence[Any]) -> Any:
    """Combine the measurements of several seeds, number by number."""
    if any(value is None for value in values):
        return None
    if isinstance(values[0], dict):
        return {part: over_seeds(part, [value[part] for value in values]) for part in values[0]}
    return max(values) if key.endswith("largest") else mean(values)


def compare(summaries: Sequence[dict[str, Any]]) -> None:
    """Add to each summary its difference from dense training, if dense is among them."""
    dense = next((one for one in summaries if one["method"] == "dense"), None)
    if dense is None:
        return
    for one in summaries:
        one["points_above_dense"] = round(100 * (one["accuracy"] - dense["accuracy"]), 6)
        one["bytes_below_dense"] = dense["bytes_a_step"] / one["bytes_a_step"]


def provenance(plan: Plan, name: str) -> dict[str, Any]:
    folder = str(Path(plan.data).parent)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    command = [name if Path(part).resolve() == Path(plan.data) else part for part in sys.argv]
    return {
        "command": " ".join(["python", *command]).replace(folder + "/", ""),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "plan": {**asdict(plan), "data": name},
        "parameters": sum(parameter.numel() for parameter in small_cnn().parameters()),
    }


def table(summaries: Sequence[dict[str, Any]]) -> Table:
    """Return the summaries as a table to print."""
    columns = ("accuracy", "over dense", "result", "selected/asked", "ξ mean", "ξ max", "kB a step")
    shown = Table("method", *columns)
    for one in summaries:
        selected, points = one["selected"], one.get("points_above_dense")
        shown.add_row(
            one["method"],
            f"{one['accuracy']:.2%}",
            "" if points is None else f"{points:+.2f}",
            f"{one['result_density']:.2%}",
            "" if selected is None else f"{selected['over_asked']:.3f}",
            *("" if one[key] is None else f"{one[key]:.2f}" for key in ("xi_mean", "xi_largest")),
            f"{one['bytes_a_step'] / 1e3:.1f}",
        )
    return shown


if __name__ == "__main__":
    main()
