"""Accuracy and loss of each method of ``examples/slow_network.py``, as means over seeds.

    python -m benchmarks.training.demo_accuracy [--data FILE.npz] [--seeds 5] [--steps 120]

Trains on four ranks over loopback, because the network's speed changes no result. Writes
``benchmarks/results/demo_accuracy_DATA.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record import RESULTS, machine, options
from sparcel.tools.lab import Loopback, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "slow_network.py"
NODES = 4


def trained(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the example with a seed, and return what it writes."""
    options = ["--seed", str(seed), "--steps", str(arguments.steps)]
    options += ["--density", str(arguments.density)]
    if arguments.data:
        options += ["--data", str(arguments.data.resolve())]
    with TemporaryDirectory() as folder, Loopback(NODES) as network:
        file = Path(folder) / "results.json"
        command = [sys.executable, str(EXAMPLE), *options, "--json", str(file)]
        if run(network, command) != 0:
            sys.exit("a training failed")
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def main() -> None:
    arguments = options(__doc__, data=Path, seeds=5, steps=120, density=0.01)
    name = arguments.data.stem if arguments.data else "digits"
    origin = machine(**{name: arguments.data})
    seeds = range(arguments.seeds)
    runs = [trained(seed, arguments) for seed in seeds]
    rows = [row for one in runs for row in one["methods"]]
    found = {
        row["method"]: {
            measured: [one[measured] for one in rows if one["method"] == row["method"]]
            for measured in ("accuracy", "loss")
        }
        for row in rows
    }
    document = {
        **origin,
        "data": name,
        "nodes": NODES,
        "batch_per_rank": runs[0]["batch_per_rank"],
        "parameters": runs[0]["parameters"],
        "steps": arguments.steps,
        "density": arguments.density,
        "seeds": list(seeds),
        "by_seed": found,
    }
    path = RESULTS / f"demo_accuracy_{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    for method, by_seed in found.items():
        print(f"{method:<12} {mean(by_seed['accuracy']):7.2%}  loss {mean(by_seed['loss']):.3f}")


if __name__ == "__main__":
    main()
