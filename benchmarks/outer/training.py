"""What training in islands ends at: outer steps beside averaging in every step.

python -m benchmarks.outer.training DATA --tasks words --runs ddp dense,lr=0.7,momentum=0.9
"""

from __future__ import annotations

from itertools import product

from benchmarks.outer.islands import ISLAND_TASKS, trained
from benchmarks.record import parser_for, run_all


def main() -> None:
    parser = parser_for(__doc__, "outer_training")
    parser.add_argument("--tasks", nargs="+", choices=ISLAND_TASKS, default=["words"])
    parser.add_argument("--runs", nargs="+", required=True, metavar="RUN")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    parser.add_argument("--islands", nargs="+", type=int, default=[4])
    parser.add_argument("--every", nargs="+", type=int, default=[30])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--warm", type=int, default=1000, help="steps of one process before")
    told = parser.parse_args()
    jobs = [
        {
            "task": task,
            "run": run,
            "seed": seed,
            "islands": islands,
            "every": every,
            "steps": told.steps,
            "warm": told.warm,
        }
        for task, every, islands, seed, run in product(
            told.tasks, told.every, told.islands, told.seeds, told.runs
        )
    ]
    run_all(told, trained, jobs)


if __name__ == "__main__":
    main()
