"""Tables and figures for the pages of docs/."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield _line(columns)
    yield "|---" * len(columns) + "|"
    yield from map(_line, rows)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


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


def apart(values: Sequence[float], digits: int) -> str:
    """Return how far the values of all seeds lie apart."""
    return f"(seeds: {max(values) - min(values):.{digits}f} apart)"


def save(figure: Figure, name: str) -> None:
    """Write ``docs/figures/NAME.svg``, the same bytes for the same figure."""
    from matplotlib import pyplot as plt

    with plt.rc_context({"svg.hashsalt": "sparcel"}):
        figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
