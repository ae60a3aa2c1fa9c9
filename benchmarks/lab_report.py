"""Tables and plots of docs/experiments.md about trainings over links, from `lab_training.py`.

    python benchmarks/lab_report.py

prints the tables as Markdown and draws ``docs/figures/lab_TASK.svg``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from convergence_report import beside, draw_losses
from pages import table
from record import RESULTS, Row, rows_of

TRAININGS = (
    *("task", "network", "method", "ms a step", "minutes", "accuracy", "over DDP", "loss"),
    *("over DDP", "fewer bytes"),
)
SECONDS = "task", "method", "steps", "seconds at 100 Mbit/s", "ms a step at 1 Gbit/s", "seconds"
SLOW, FAST = "100mbit", "1gbit"


def lab_rows() -> list[Row]:
    """Return the record's rows."""
    return rows_of(RESULTS / "lab_training.json")


def trainings_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of all whole trainings, beside DDP alone, over any network."""
    base = {_training(row): row for row in rows if row["method"] == "DDP"}
    return table(TRAININGS, (_cells(row, base[_training(row)]) for row in whole(rows)))


def _cells(row: Row, base: Row) -> Sequence[str]:
    return (
        *(row["task"], row["network"], row["method"], f"{1e3 * row['step_s']:.0f}"),
        f"{row['train_seconds'][-1] / 60:.1f}",
        *beside(row, base),
        f"{row['compression']:.1f}×",
    )


def seconds_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of how long each method takes to DDP's perplexity at the end + 1 %.

    Losses do not depend on the network. So steps are those of the whole training, and where only
    the time of a step was measured, seconds are their product.
    """
    return table(SECONDS, _seconds(rows))


def _seconds(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    base = {_training(row): row for row in rows if row["method"] == "DDP"}
    fast = {(row["task"], row["method"]): row["step_s"] for row in rows if row["network"] == FAST}
    for row in whole(rows):
        if row["network"] != SLOW:
            continue
        *_, (_, _, final) = base[_training(row)]["held_out"]
        wanted = final + math.log(1.01)
        reached = [(step, second) for step, second, loss in row["held_out"] if loss <= wanted]
        step_s = fast.get((row["task"], row["method"]))
        step, second = reached[0] if reached else (None, None)
        yield (
            *(row["task"], row["method"], "never" if step is None else f"{step}"),
            "" if second is None else f"{second:.0f}",
            "" if step_s is None else f"{1e3 * step_s:.0f}",
            "" if step_s is None or step is None else f"{step * step_s:.0f}",
        )


def whole(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of whole trainings; others were made to time steps."""
    longest = {
        row["task"]: max(one["steps"] for one in rows if one["task"] == row["task"]) for row in rows
    }
    return [row for row in rows if row["steps"] == longest[row["task"]]]


def _training(row: Row) -> tuple[str, int, int]:
    return row["task"], row["steps"], row["seed"]


def draw(rows: Sequence[Row], task: str) -> None:
    """Draw the training loss of each method against time."""
    shown = [row for row in whole(rows) if (row["task"], row["network"]) == (task, SLOW)]
    draw_losses(
        shown,
        lambda row: [second / 60 for second in row["train_seconds"]],
        f"minutes, {SLOW}",
        f"lab_{task.replace(' ', '_')}",
    )


def main() -> None:
    rows = lab_rows()
    print("\n".join(trainings_table(rows)), end="\n\n")
    print("\n".join(seconds_table(rows)))
    for task in {row["task"] for row in rows}:
        draw(rows, task)


if __name__ == "__main__":
    main()
