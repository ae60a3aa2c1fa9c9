"""Tables and figures for the pages of docs/."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
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


def save(figure: Figure, name: str) -> None:
    """Write ``docs/figures/NAME.svg``, the same bytes for the same figure."""
    from matplotlib import pyplot as plt

    with plt.rc_context({"svg.hashsalt": "sparcel"}):
        figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
