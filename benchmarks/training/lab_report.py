"""A table of docs/records/training.md, and what pages say, of trainings over links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from benchmarks.pages.tables import over_seeds, perplexity, table
from benchmarks.record import Row, rows_of

TRAININGS = (
    *("task", "method", "ms a step", "minutes", "perplexity over DDP", "fewer bytes"),
    *("seconds to + 1 %", "ms a step at 1 Gbit/s", "seconds to + 1 %"),
)
SLOW, FAST = "100mbit", "1gbit"
FRONT = "medium words"
CALLED = {
    "PowerSGD 4": "PowerSGD",
    "sparcel": "sparcel",
    "sparcel 10 %": "at 10 %",
    "bf16": "bfloat16",
}
"""What the front page's picture calls methods."""


def lab_rows() -> list[Row]:
    """Return the record's rows."""
    return rows_of("lab_training")


def trainings_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of all whole trainings at 100 Mbit/s and of DDP alone without a limit.

    A training's seconds to + 1 % are those until it reaches DDP's perplexity at the end + 1 %.
    Losses do not depend on the network. So at 1 Gbit/s they are the seconds of the same step; after
    a training that was not whole, of steps times a step's time.
    """
    base = {_training(row): row for row in rows if row["method"] == "DDP"}
    reached = {id(row): place for row, place in _reached(rows)}
    fast = {(row["task"], row["method"]): row for row in rows if row["network"] == FAST}
    shown = sorted(
        (row for row in whole(rows) if row["network"] != FAST),
        key=lambda row: (row["task"], row["method"] != "DDP", row["step_s"]),
    )
    return table(
        TRAININGS,
        (
            [
                *_cells(row, base[_training(row)]),
                *_seconds(reached.get(id(row)), fast.get((row["task"], row["method"]))),
            ]
            for row in shown
        ),
    )


def _cells(row: Row, base: Row) -> Sequence[str]:
    return (
        *(row["task"], row["method"], f"{1e3 * row['step_s']:.0f}"),
        f"{row['train_seconds'][-1] / 60:.1f}",
        f"{over_seeds(perplexity([(row, base)]), 1)} %",
        f"{row['compression']:.1f}×",
    )


def _seconds(reached: tuple[int, float] | None, fast: Row | None) -> Iterator[str]:
    step, second = reached or (None, None)
    yield "" if second is None else f"{second:.0f}"
    if fast is None:
        yield from ("", "")
        return
    measured = {at: after for at, after, _ in fast["held_out"]}
    yield f"{1e3 * fast['step_s']:.0f}"
    yield "" if step is None else f"{measured.get(step, step * fast['step_s']):.0f}"


def _reached(rows: Sequence[Row]) -> Iterator[tuple[Row, tuple[int, float] | None]]:
    """Yield the trainings at 100 Mbit/s, and at which step and second they reach the perplexity."""
    base = {_training(row): row for row in rows if row["method"] == "DDP"}
    for row in whole(rows):
        if row["network"] == SLOW:
            *_, (_, _, final) = base[_training(row)]["held_out"]
            wanted = final + math.log(1.01)
            reached = [(step, second) for step, second, loss in row["held_out"] if loss <= wanted]
            yield row, reached[0] if reached else None


def whole(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of whole trainings; others were made to time steps."""
    longest = {
        row["task"]: max(one["steps"] for one in rows if one["task"] == row["task"]) for row in rows
    }
    return [row for row in rows if row["steps"] == longest[row["task"]]]


def _training(row: Row) -> tuple[str, int, int]:
    return row["task"], row["steps"], row["seed"]


def front(rows: Sequence[Row]) -> tuple[Row, dict[str, tuple[Row, str]]]:
    """Return DDP's row, and of each method on the slow links its row and how it fares."""
    (base,) = (row for row in whole(rows) if (row["task"], row["method"]) == (FRONT, "DDP"))
    told = {}
    for row, _ in _reached(rows):
        if row["task"] == FRONT:
            (above,) = perplexity([(row, base)])
            where = f"{abs(above):.1f} % {'above' if above > 0 else 'below'}"
            minutes = row["train_seconds"][-1] / 60
            told[CALLED[row["method"]]] = row, f"ends {where} after {minutes:.1f} min"
    return base, told


def front_sentence(rows: Sequence[Row]) -> str:
    """Return what pages say that show the front page's picture."""
    told = {name: text for name, (_, text) in front(rows)[1].items()}
    return (
        f"Beside plain DDP's perplexity, sparcel {told['sparcel']}, at 10 % it"
        f" {told['at 10 %']}, bfloat16 {told['bfloat16']}, and PowerSGD {told['PowerSGD']}."
    )
