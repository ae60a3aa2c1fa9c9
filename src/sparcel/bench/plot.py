"""Plots of results: time against density, ranks and size, and the time by phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparcel.bench.baselines import DENSE
from sparcel.bench.draw import Point, Quantity, breakdown, curves
from sparcel.bench.results import Results
from sparcel.errors import InputError, optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_QUANTITIES = (
    Quantity(
        "density",
        "density: share of the coordinates that a rank sends, %",
        lambda p: 100 * p.cell.density,
    ),
    Quantity("ranks", "ranks", lambda p: p.ranks),
    Quantity("size", "coordinates", lambda p: p.cell.size),
)


Fixed = tuple[tuple[str, str], ...]
"""Names and texts of the properties that all cells of a plot have in common."""


def plot(results: Sequence[Results], folder: Path) -> list[Path]:
    """Draw time against each quantity with several values, and each case's phases.

    Returns the files written.

    Parameters
    ----------
    results
        Results of one or more runs; plots against ranks need runs on different numbers of ranks.
    folder
        Folder for the PNGs; made if it is missing.

    Raises
    ------
    InputError
        When there is nothing to draw.
    MissingDependencyError
        When matplotlib is not installed.
    """
    with optional("sparcel bench plot", "plots"):
        from matplotlib.figure import Figure
    points = [
        Point(one.world_size, one.network["description"], cell)
        for one in results
        for cell in one.cells
    ]
    if not points:
        raise InputError("there are no cells to plot")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, title, draw in _figures(points):
        figure = Figure(layout="constrained")
        figure.suptitle(title, fontsize=11)
        draw(figure)
        path = folder / f"{name}.png"
        if path in written:  # of another network
            path = folder / f"{name}_{len(written)}.png"
        figure.savefig(path, dpi=140)
        written.append(path)
    return written


def _figures(points: list[Point]) -> Iterator[tuple[str, str, Callable[[Figure], None]]]:
    """Yield file name, title and drawing function of each figure."""
    dense = [point for point in points if point.cell.algorithm in DENSE]
    sparse = [point for point in points if point.cell.algorithm not in DENSE]
    for quantity in _QUANTITIES:
        for fixed, group in _grouped(sparse, quantity).items():
            values = sorted({quantity.of(point) for point in group})
            if len(values) > 1:
                beside = [point for point in dense if _comparable(point, group, quantity)]
                title = ", ".join(text for name, text in fixed if name != quantity.name)
                yield (
                    f"{quantity.name}_{_slug(fixed, quantity.name)}",
                    title,
                    partial(curves, group=group, dense=beside, quantity=quantity),
                )
    for fixed, group in _grouped(sparse, None).items():
        beside = [point for point in dense if _comparable(point, group, None)]
        title = ", ".join(text for _, text in fixed)
        yield (
            f"breakdown_{_slug(fixed, None)}",
            title,
            partial(breakdown, group=group, dense=beside),
        )


def _grouped(points: list[Point], free: Quantity | None) -> dict[Fixed, list[Point]]:
    """Group the points by all properties except the one on the horizontal axis."""
    groups: dict[Fixed, list[Point]] = defaultdict(list)
    for point in points:
        cell = point.cell
        fixed = {
            "size": f"{cell.size:,} coordinates",
            "density": f"{100 * cell.density:.3g} %",
            "distribution": cell.distribution,
            "ranks": f"{point.ranks} ranks",
            "network": point.network,
        }
        if free is not None:
            fixed.pop(free.name)
        if free is not None and free.name == "ranks":
            fixed.pop("network")  # its description counts the nodes
        groups[tuple(fixed.items())].append(point)
    return groups


def _slug(fixed: Fixed, free: str | None) -> str:
    parts = [text for name, text in fixed if name not in (free, "network")]
    plain = "_".join(parts).replace(" coordinates", "").replace(",", "").replace(" %", "pct")
    return plain.replace(" ", "")


def _comparable(dense: Point, group: list[Point], free: Quantity | None) -> bool:
    """Tell whether a dense baseline can be compared with a group of cells."""
    name = None if free is None else free.name
    return any(
        (name == "size" or dense.cell.size == point.cell.size)
        and (name == "ranks" or (dense.ranks, dense.network) == (point.ranks, point.network))
        for point in group
    )
