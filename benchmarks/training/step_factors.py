"""How many times dense training's steps methods need for the same loss: a table of training.md.

    python -m benchmarks.training.step_factors

prints it as Markdown, from the records of `frontier_report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log
from statistics import geometric_mean, mean

from benchmarks.pages.tables import table
from benchmarks.record import Row
from benchmarks.training.frontier_report import (
    BY_BITS,
    CHOSEN,
    all_rows,
    dense_of,
    setting_of,
    usual_of,
)
from benchmarks.training.tasks import TASKS


def steps_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of how many steps methods need for dense training's loss, by task."""
    tasks = "words", "images", "code, Muon", "code", "code 6M"
    cells = (
        [label, *(_factors(rows, run, task) for task in tasks)]
        for run, label in (BY_BITS | CHOSEN).items()
    )
    return table(("method", *tasks), cells)


def _factors(rows: Sequence[Row], run: str, task: str) -> str:
    """Return the mean of the factors, and of several seeds the least and the largest."""
    found = step_factors(rows, run, task)
    if not found:
        return ""
    shorter, usual = _lengths(rows, task)
    if max(found) > usual / shorter:
        return f"over {usual / shorter:.0f}"  # nobody trained as short as that
    several = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
    return f"{geometric_mean(found):.2f}{several}"


def step_factors(rows: Sequence[Row], run: str, task: str) -> list[float]:
    """Return how many times dense training's steps a run needs for the same loss, by seed.

    Dense training's loss falls about as the logarithm of its steps, between trainings of two
    lengths that each end at their own lowest rate. What a run ends above dense training with its
    seed, over this slope, is the logarithm of its factor. Empty where dense trainings of one length
    alone are known, or the longer ones end no lower.
    """
    shorter, usual = _lengths(rows, task)
    dense, found = dense_of(rows), usual_of(rows, run, task)
    ends = {
        steps: {seed: row for (*at, seed), row in dense.items() if at == [task, 8, steps]}
        for steps in (shorter, usual)
    }
    both = ends[shorter].keys() & ends[usual].keys()
    if shorter == usual or not both:
        return []
    rise = mean(ends[shorter][seed]["loss"] - ends[usual][seed]["loss"] for seed in both)
    slope = rise / log(usual / shorter)
    lost = [row["loss"] - dense[*setting_of(row), row["seed"]]["loss"] for row in found]
    return [exp(one / slope) for one in lost] if slope > 0 else []


def _lengths(rows: Sequence[Row], task: str) -> tuple[int, int]:
    """Return the steps of the longest shorter dense training of a task, and those of a usual one.

    The same twice if there is no shorter one.
    """
    usual = TASKS[task].steps
    steps = {row["steps"] for row in rows if (row["run"], row["task"]) == ("dense", task)}
    return max((one for one in steps if one < usual), default=usual), usual


if __name__ == "__main__":
    print("\n".join(steps_table(all_rows())))
