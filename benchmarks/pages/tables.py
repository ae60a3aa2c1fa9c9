"""Tables for the pages of docs/."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import exp
from statistics import mean, stdev

from benchmarks.record import Row


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, which has rows."""
    cells = [*map(tuple, rows)]
    assert cells, f"nothing is recorded for the table of {', '.join(columns)}"
    head, *lines = (f"| {' | '.join(row)} |" for row in (columns, *cells))
    yield from (head, "|---" * len(columns) + "|", *lines)


def over_seeds(values: Sequence[float], digits: int) -> str:
    """Return what seeds show: of three and more the mean with its 95 % interval, else each value.

    This is what ± means on all pages. The interval is that of Student's t.
    """
    from scipy.stats import t as student

    count = len(values)
    if count < 3:
        return ", ".join(f"{value:+.{digits}f}" for value in values)
    half = float(student.ppf(0.975, count - 1)) * stdev(values) / count**0.5
    return f"{mean(values):+.{digits}f} ± {half:.{digits}f}"


Pairs = Iterable[tuple[Row, Row]]
"""Rows of trainings, each with that of dense training, or of another one to compare with."""


def points(pairs: Pairs) -> list[float]:
    """Return how many points of accuracy trainings have over others."""
    return [100 * (row["accuracy"] - base["accuracy"]) for row, base in pairs]


def perplexity(pairs: Pairs) -> list[float]:
    """Return how much more perplexity trainings have than others, %."""
    return [100 * (exp(row["loss"] - base["loss"]) - 1) for row, base in pairs]
