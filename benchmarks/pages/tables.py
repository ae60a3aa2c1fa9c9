"""Tables and figures for the pages of docs/."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FIGURES = Path(__file__).parents[2] / "docs" / "figures"

DENSE, ROUNDED, POWERSGD, SPARCEL = "black", "#777777", "#b35900", "#1f5fa8"
"""The colours of methods that many figures show: in float32, in bfloat16, the two others."""

COLOURS = (
    *("#3a6fb0", "#d62728", "#2a8a3a", "#d4b106"),
    *("#8e44ad", "#8c564b", "#f29ac0", "#3fc1a9"),
)
"""Eight that differ also where lines are thin."""

BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
"""Where a legend of many entries is."""


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


def style() -> None:
    """Set what all figures have in common, which are to be read at 720 pixels and less."""
    from cycler import cycler
    from matplotlib import pyplot as plt

    colours, lines = cycler(color=COLOURS), cycler(linestyle=["-", "--"])
    plt.rcdefaults()  # a user's own style would change the figures
    plt.rcParams.update(
        {
            "axes.prop_cycle": lines * colours,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "axes.titlesize": "medium",
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "legend.fontsize": "small",
            "legend.frameon": False,
            "lines.markersize": 5,
            "svg.hashsalt": "sparcel",
        }
    )


def subplots(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 4), **options: Any
) -> tuple[Figure, Any]:
    """Return a figure in the common style, and its axes; ``size`` is in inches."""
    from matplotlib import pyplot as plt

    style()
    return plt.subplots(rows, columns, figsize=size, **options)


def plain(axis: Axis) -> None:
    """Write the numbers of a logarithmic axis plainly, at as many places as there is room for."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    subs: Sequence[float] = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=subs if high < 1000 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def save(figure: Figure, name: str) -> None:
    """Write ``docs/figures/NAME.svg``, the same bytes for the same figure."""
    from matplotlib import pyplot as plt

    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
