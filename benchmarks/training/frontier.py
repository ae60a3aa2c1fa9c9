"""What training ends at for the bytes that it sends, with any density, format and method.

    python -m benchmarks.training.frontier DATA --runs dense oktopk,0.08,packed:4,front

A run is named by scheme, density and format, as in ``bidirectional,0.1/0.3,packed:4/6``, where
owners return 0.3 of their sums, in 6 bits; by ``front`` if its first steps send more, or by the
densities of its first steps, as in ``1:0.5*40`` for 40 steps each; and by ``still`` if it does not
step ahead. Or it is one of torch's hooks: ``bf16``, ``fp16``, ``powersgd,RANK`` or
``powersgd,RANK,START`` (see `peers.py`).
``DATA``, tasks, seeds and the simulated cluster are those of `convergence.py`; collectives are
chosen for links of 100 Mbit/s.

Rows of the record tell ``share``: the bytes of a step at the worst rank, of those that a ring takes
for the gradient in float32. Runs that the record has already are not repeated.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.record import Row, parser_for, run_all
from benchmarks.training.convergence import RANKS, SUITE
from benchmarks.training.peers import HALVES, train_with_hook
from benchmarks.training.task_training import Method, train
from benchmarks.training.tasks import TASKS
from sparcel.core.cost import stated_rates
from sparcel.core.formats import format_named

VALUE_BYTES = 4
LINK = 12.5e6
"""Bytes a second, 100 Mbit/s."""
LATENCY_S = 100e-6


def trained(data: Path, task: str, run: str, seed: int, ranks: int, steps: int) -> Row:
    """Train once, and return the row."""
    usual = TASKS[task]
    about = {"kind": usual.kind, "optimizer": usual.optimizer}
    if run in HALVES or run.startswith("powersgd,"):
        return {**about, **train_with_hook(data, task, run, seed, steps)}
    rates = stated_rates(bandwidth=LINK, latency_s=LATENCY_S, ranks=ranks)
    row = train(data, task, method_of(run), seed, ranks, usual.batch, usual.lr, steps, rates)
    model = usual.model(usual.read(data / usual.folder, seed))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dense = 2 * (ranks - 1) / ranks * VALUE_BYTES * parameters
    return {**about, **row, "parameters": parameters, "share": row["bytes_a_step"] / dense}


def method_of(run: str) -> Method:
    """Return the method that a run names."""
    scheme, *rest = run.split(",")
    if not rest:
        return Method(run, scheme)
    densities, formats, *words = rest
    density, _, returned = densities.partition("/")
    format, _, answer = formats.partition("/")
    settings: dict[str, Any] = {"density": float(density), "format": format}
    if returned:
        settings["returned"] = float(returned)
    if answer:
        settings["answer"] = f"{format_named(format).indices}:{answer}"
    for first in set(words) - {"front", "still"}:
        densities, _, steps = first.partition("*")
        settings["warmup"] = [float(one) for one in densities.split(":")]
        settings["warmup_steps"] = int(steps)
    return Method(run, scheme, settings, ahead="still" not in words, frontload="front" in words)


def main() -> None:
    parser = parser_for(__doc__, "frontier")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=SUITE)
    parser.add_argument("--runs", nargs="+", required=True, metavar="RUN")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--fewer-steps", type=float, default=1, help="by this factor; default: 1")
    told = parser.parse_args()
    jobs = [
        {
            "task": task,
            "run": run,
            "seed": seed,
            "ranks": told.ranks,
            "steps": round(TASKS[task].steps / told.fewer_steps),
        }
        for seed, run, task in product(told.seeds, told.runs, told.tasks)
    ]
    run_all(told, trained, jobs)


if __name__ == "__main__":
    main()
