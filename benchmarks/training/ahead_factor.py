"""How far ahead a rank should look: training with the step of step-ahead multiplied.

    python -m benchmarks.training.ahead_factor DATA --tasks characters --factors 1 2 4

A factor of 1 moves a parameter by ``lr·memory``; `sparcel.attach` takes 1 + momentum. Runs that the
record has are not repeated. ``DATA`` is as for ``convergence.py``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import sparcel
from benchmarks.record import RESULTS, Row, extend
from benchmarks.training.task_training import Method, Run, evaluate
from benchmarks.training.tasks import MOMENTUM, TASKS
from sparcel.training import ahead

RANKS = 8

METHODS = {
    method.label: method
    for method in (
        Method("gtopk", "gtopk"),
        Method("scalecom", "scalecom"),
        Method("scalecom, chunks", "scalecom", {"selector": "chunkwise"}),
    )
}


def train(data: Path, task: str, method: str, factor: float, seed: int) -> Row:
    """Train once with the step ahead multiplied, and return the row."""
    torch.set_num_threads(1)
    two_steps = ahead._two_steps

    def multiplied(*arguments: Any) -> ahead.Move:
        move = two_steps(*arguments)
        return replace(move, rate=move.rate * factor / (1 + MOMENTUM))

    with patch.object(ahead, "_two_steps", multiplied):
        run = Run(data, TASKS[task], METHODS[method], seed)
        report = sparcel.simulate(RANKS, run.rank)
    return {
        "task": task,
        "method": method,
        "factor": factor,
        "seed": seed,
        **evaluate(run.model, run.split),
        "density_before": report.results[0].density_before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder that holds the tasks' folders")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["clothes", "characters"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--factors", nargs="+", type=float, default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, help="runs at a time; default: a run on each core")
    arguments = parser.parse_args()
    jobs = (
        {"task": task, "method": label, "factor": factor, "seed": arguments.seed}
        for task, label, factor in product(arguments.tasks, arguments.methods, arguments.factors)
    )
    output = RESULTS / "ahead_factor.json"
    for row in extend(output, train, arguments.data, jobs, arguments.processes):
        print(f"{row['task']}, {row['method']}, {row['factor']:g}: {row['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
