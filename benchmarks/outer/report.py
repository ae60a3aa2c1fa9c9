"""Prints the tables of the page on outer steps from the records.

python -m benchmarks.outer.report
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from statistics import mean

import torch

import sparcel
from benchmarks.outer.training import LINKS
from benchmarks.pages.tables import perplexity, table
from benchmarks.record import Row, grouped, rows_of
from sparcel.core.comm import Communicator

RECORDS = ("training", "muon", "images", "every", "islands")
COMPUTE_S = 0.1
"""Seconds that a step of a larger model takes on a GPU, stated, not measured."""


def rows(*names: str) -> list[Row]:
    return [row for name in names for row in rows_of(f"outer_{name}")]


@cache
def every_step_s(link: str, parameters: int, ranks: int) -> float:
    """Return the seconds of a ring's all-reduce of the gradient in 16 bits."""

    def reduce(comm: Communicator) -> None:
        comm.all_reduce(torch.zeros(parameters // 2))

    return sparcel.simulate(ranks, reduce).seconds_on(LINKS[link])


def endings() -> Iterator[str]:
    """Yield the table of what trainings end at."""
    dense = {
        (row["task"], row["islands"], row["seed"]): row
        for row in rows(*RECORDS)
        if row["run"] == "ddp"
    }
    cells = []
    for (*place, every, run), found in grouped(
        rows(*RECORDS), "task", "islands", "every", "run"
    ).items():
        found = sorted(found, key=lambda row: row["seed"])
        keys = [(row, (*place, row["seed"])) for row in found]
        over = perplexity((row, dense[key]) for row, key in keys if key in dense)
        cells.append(
            [
                *map(str, place),
                "1" if run in ("ddp", "bf16", "attach") else str(every),
                f"`{run}`",
                ", ".join(f"{row['perplexity']:.3f}" for row in found),
                f"{mean(over):+.1f} %" if over else "",
                f"{mean(row['bits_up'] for row in found):.2f}" if "bits_up" in found[0] else "",
            ]
        )
    columns = "task", "islands", "H", "method", "perplexity, by seed", "over DDP", "bits sent"
    return table(columns, cells)


def times(records: tuple[str, ...], task: str, baseline: str, seed: int = 0) -> Iterator[str]:
    """Yield seconds until a run has the loss that a baseline ends at."""
    yield "| link | a step | method | steps | seconds | of the baseline's |"
    yield "|---|---|---|---|---|---|"
    found = [
        row
        for row in rows(*records)
        if (row["task"], row["seed"], row["islands"]) == (task, seed, 4)
        and row["run"] not in ("bf16", "attach")
    ]
    goal = next(row for row in found if row["run"] == baseline)["curve"][-1][1]
    measured = next(row["step_s"] for row in found if row["step_s"])
    for link in LINKS:
        for compute in (measured, COMPUTE_S):
            seconds = {}
            for row in found:
                steps = next((at for at, loss in row["curve"] if loss <= goal), None)
                if steps is None:
                    seconds[label(row)] = (row["steps"], math.inf)
                elif row["run"] == "ddp":  # the exchange goes on beside the backward pass
                    step = max(compute, every_step_s(link, row["parameters"], row["islands"]))
                    seconds[label(row)] = (steps, steps * step)
                else:
                    exchange = row[f"exchange_s at {link}"] / row["every"]
                    seconds[label(row)] = (steps, steps * (compute + exchange))
            base = next(s for name, (_, s) in seconds.items() if name.startswith(baseline))
            for name, (steps, total) in seconds.items():
                told = f"{total:,.0f} | {total / base:.2f} |"
                told = "not reached | |" if math.isinf(total) else told
                yield f"| {link} | {1000 * compute:.1f} ms | `{name}` | {steps} | {told}"


def label(row: Row) -> str:
    return f"{row['run']} {row['steps']}" if row["run"] != "ddp" else "ddp in 16 bits"


def tables() -> Iterator[str]:
    """Yield all lines of all tables."""
    yield from endings()
    yield ""
    yield from times(("training", "longer"), "text", "ddp")
    yield ""
    yield from times(("wide",), "wide words", "diloco")


if __name__ == "__main__":
    print("\n".join(tables()))
