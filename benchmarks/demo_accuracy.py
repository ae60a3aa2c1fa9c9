"""Accuracy of each method of ``sparcel demo``, as the mean over seeds.

    python benchmarks/demo_accuracy.py [--data PATH] [--seeds 5] [--steps 120]

Trains as the demo does, but over loopback, because the network's speed changes no result. Writes
``benchmarks/results/demo_accuracy_DATA.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from sparcel.demo.data import load
from sparcel.demo.run import run
from sparcel.demo.settings import BATCH_PER_RANK, DemoSettings
from sparcel.lab import Loopback

_RESULTS = Path(__file__).parent / "results"
_NODES = 4


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="as for sparcel demo; default: scikit-learn's digits")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--density", type=float, default=0.01)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    data = arguments.data and str(Path(arguments.data).resolve())
    schemes = ("topk", "gtopk", "oktopk")
    settings = [
        DemoSettings(arguments.steps, seed, arguments.density, schemes, data, counts_wire=False)
        for seed in range(arguments.seeds)
    ]
    accuracies: dict[str, list[float]] = {}
    console = Console(highlight=False)
    for one in settings:
        console.print(f"seed {one.seed}")
        with Loopback(_NODES) as network:
            outcome = run(network, one, console)
        for row in outcome.rows:
            accuracies.setdefault(row.method, []).append(row.accuracy)

    means = {method: statistics.mean(values) for method, values in accuracies.items()}
    name = load(data).name
    document = {
        "command": " ".join(["python", *sys.argv]).replace(str(arguments.data), name),
        "versions": {package: version(package) for package in ("sparcel", "torch")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": name,
        "nodes": _NODES,
        "batch_per_rank": BATCH_PER_RANK,
        "parameters": outcome.parameters,
        "steps": arguments.steps,
        "density": arguments.density,
        "seeds": [one.seed for one in settings],
        "accuracy_by_seed": accuracies,
        "accuracy_mean": means,
        "points_above_dense_fp32": {
            method: 100 * (mean - means["dense fp32"]) for method, mean in means.items()
        },
    }
    path = _RESULTS / f"demo_accuracy_{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    for method, mean in means.items():
        above = document["points_above_dense_fp32"][method]
        console.print(f"{method:<12} {100 * mean:6.2f} %  {above:+.2f} points")
    console.print(f"Results: {path}")


if __name__ == "__main__":
    main()
