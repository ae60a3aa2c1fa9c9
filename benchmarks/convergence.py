"""What training with each scheme ends at, beside dense training, on real tasks.

    python benchmarks/convergence.py DATA [--tasks images words] [--methods topk] [--seeds 3]

``DATA`` holds a folder for each task, see `tasks.TASKS`. Eight ranks of a simulated cluster train:
the collectives and the bytes are real, the network is not. Runs that the record has already are not
repeated, so the suite can be stopped and started again. ``--tune`` trains densely with several
learning rates instead, by which those in `tasks.TASKS` were chosen; ``--causes`` switches off one
protection at a time.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from machine import machine
from rich.console import Console
from task_training import Method, train
from tasks import TASKS

RESULTS = Path(__file__).parent / "results"
NODES = {"ranks_per_node": 4}

METHODS = (
    Method("dense", "dense"),
    Method("topk", "topk"),
    Method("sparcml", "sparcml"),
    Method("gtopk", "gtopk"),
    Method("oktopk", "oktopk"),
    Method("scalecom", "scalecom"),
    Method("hitopk 2×4", "hitopk", NODES),
    Method("mstopk", "mstopk"),
    Method("gaussiank", "gaussiank"),
    Method("dgc", "dgc", {"density": 0.01}),
    Method("oktopk reuse", "oktopk", {"threshold": "reuse"}),
    Method("scalecom β=0.1", "scalecom", {"beta": 0.1}),
    Method("sparcml 4 bits", "sparcml", {"bits": 4}),
    Method("topk 0.1 %", "topk", {"density": 0.001}),
    Method("oktopk 0.1 %", "oktopk", {"density": 0.001}),
)

_JUDGED = ("topk", "sparcml", "gtopk", "oktopk", "scalecom")

CAUSES = tuple(
    replace(method, label=f"{method.label}, {label}", ahead=ahead, frontload=frontload)
    for method in METHODS
    if method.label in _JUDGED
    for label, ahead, frontload in (
        ("constant density", True, False),
        ("not ahead", False, True),
        ("unprotected", False, False),
    )
)


@dataclass(frozen=True)
class Job:
    """One run; ``lr`` replaces the task's learning rate."""

    task: str
    method: Method
    seed: int
    lr: float | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return self.task, self.method.label, self.seed, self.lr or TASKS[self.task].lr


def main() -> None:
    arguments = _arguments()
    name = "convergence_tuning" if arguments.tune else "convergence"
    output = arguments.output or RESULTS / f"{name}.json"
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    done = {(row["task"], row["method"], row["seed"], row["lr"]) for row in rows}
    jobs = [job for job in _jobs(arguments) if job.key not in done]
    console = Console(highlight=False)
    console.print(f"{len(jobs)} runs to do, {len(rows)} recorded")
    origin = machine()
    for row in _run(arguments.data.resolve(), jobs, arguments.processes):
        rows.append({**row, "commit": origin["commit"], "date": origin["date"]})
        document = {**origin, "rows": rows}
        output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        loss = "diverged" if row["loss"] is None else f"loss {row['loss']:.4f}"
        console.print(
            f"{row['task']}, {row['method']}, lr {row['lr']:g}, seed {row['seed']}:"
            f" {row['accuracy']:.2%}, {loss}, {row['minutes']} minutes"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder that holds the tasks' folders")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", metavar="LABEL", help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0 on")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--tune", nargs="+", type=float, metavar="LR", help="train densely")
    parser.add_argument("--causes", action="store_true", help="one protection switched off")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def _jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """Yield the runs, one seed of everything before the next."""
    methods: Sequence[Method] = CAUSES if arguments.causes else METHODS
    if arguments.tune:
        methods = METHODS[:1]
    for seed in range(arguments.seeds):
        for method in methods:
            if arguments.methods is None or method.label in arguments.methods:
                for task in arguments.tasks:
                    for lr in arguments.tune or [None]:
                        yield Job(task, method, seed, lr)


def _run(data: Path, jobs: Sequence[Job], processes: int) -> Iterator[dict[str, Any]]:
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        runs = [pool.submit(train, data, j.task, j.method, j.seed, lr=j.lr) for j in jobs]
        for run in as_completed(runs):
            yield run.result()


if __name__ == "__main__":
    main()
