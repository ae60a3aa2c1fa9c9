"""Plots of results: time against density, ranks and size, and the time by phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from sparcel.errors import InputError, optional
from sparcel.tools.bench.contenders import DENSE, STEP
from sparcel.tools.bench.results import Cell, Results, digits
from sparcel.tools.bench.timing import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = {"gloo": "-", "mpi": "--"}
_DENSE_COLOURS = dict(zip(DENSE, ("black", "grey"), strict=True))
_COLOURS = (
    *("#3a6fb0", "#d62728", "#2a8a3a", "#d4b106"),
    *("#8e44ad", "#8c564b", "#f29ac0", "#3fc1a9"),
)
_MARKERS = "osD^"
"""For the first eight methods, the second eight, and so on: more colours are told apart by none."""
_PHASE_COLOURS = dict(
    zip((*PHASES, "other"), ("#3a6fb0", "#d62728", "#d4b106", "#2a8a3a", "#bbbbbb"), strict=True)
)
_KINDS = ("sums and exchanges", "whole steps")
_BESIDE = {"fontsize": 8, "loc": "center left", "bbox_to_anchor": (1, 0.5), "frameon": False}


@dataclass(frozen=True)
class _Point:
    """A cell, with the number of ranks and the network on which it was measured."""

    ranks: int
    network: str
    cell: Cell

    @property
    def method(self) -> str:
        """The algorithm, or the scheme of a whole step."""
        return self.cell.algorithm.removeprefix(STEP)

    @property
    def kind(self) -> str:
        return _KINDS[self.cell.algorithm.startswith(STEP)]

    @property
    def ms(self) -> float:
        return 1000 * self.cell.median

    @property
    def fixed(self) -> dict[str, str]:
        """What a plot of the cell tells in its title, by name."""
        return {
            "size": f"{self.cell.size:,} coordinates",
            "density": f"{100 * self.cell.density:.3g} %",
            "distribution": self.cell.distribution,
            "ranks": f"{self.ranks} ranks",
            "network": self.network,
        }

    @property
    def phases_ms(self) -> list[float]:
        """Milliseconds of each phase, and of the rest of the median."""
        phases = [1000 * self.cell.phases[name] for name in PHASES]
        # Phases come from separate runs, so by noise their sum may exceed the median.
        scale = min(1.0, self.ms / (sum(phases) or 1.0))
        return [scale * phase for phase in phases] + [self.ms - scale * sum(phases)]


_Values = Callable[[_Point], float]

_QUANTITIES: dict[str, tuple[str, _Values]] = {
    "density": (
        "density: share of the coordinates that a rank sends, %",
        lambda p: 100 * p.cell.density,
    ),
    "ranks": ("ranks", lambda p: p.ranks),
    "size": ("coordinates", lambda p: p.cell.size),
}
"""What may lie on the horizontal axis: its label, and its value for a cell."""


def plot(results: Sequence[Results], folder: Path, suffix: str = ".png") -> list[Path]:
    """Draw time against each quantity with several values, and each case's phases.

    Returns the files written.

    Parameters
    ----------
    results
        Results of one or more runs; plots against ranks need runs on different numbers of ranks.
    folder
        Folder for the plots; made if it is missing.
    suffix
        Of the files, which decides their format: ``".png"``, ``".svg"``, ``".pdf"``.

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
        _Point(one.world_size, one.network["description"], cell)
        for one in results
        for cell in one.cells
    ]
    if not points:
        raise InputError("there are no cells to plot")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, title, draw in _figures(points):
        figure = Figure(layout="constrained")
        figure.suptitle(title, fontsize=9)
        draw(figure)
        path = folder / f"{name}{suffix}"
        if path in written:  # of another network
            path = folder / f"{name}_{len(written)}{suffix}"
        figure.savefig(path, dpi=140, metadata={"Date": None} if suffix == ".svg" else {})
        written.append(path)
    return written


def _figures(points: list[_Point]) -> Iterator[tuple[str, str, Callable[[Figure], None]]]:
    """Yield file name, title and drawing function of each figure."""
    for free, (_, of) in _QUANTITIES.items():
        # The network's description counts the nodes.
        ignored = {free, "network"} if free == "ranks" else {free}
        for fixed, group, dense in _grouped(points, ignored):
            if len({of(point) for point in group}) > 1:
                draw = partial(_curves, group=group, dense=dense, free=free)
                yield f"{free}_{_slug(fixed)}", ", ".join(fixed.values()), draw
    for fixed, group, dense in _grouped(points, set()):
        draw = partial(_breakdown, group=group, dense=dense)
        yield f"breakdown_{_slug(fixed)}", ", ".join(fixed.values()), draw


def _grouped(
    points: list[_Point], ignored: set[str]
) -> Iterator[tuple[dict[str, str], list[_Point], list[_Point]]]:
    """Yield what the cells of a plot have in common, the cells, and the dense ones beside them."""
    groups: dict[tuple[tuple[str, str], ...], list[_Point]] = defaultdict(list)
    for point in points:
        if point.cell.algorithm not in DENSE:
            groups[tuple((n, t) for n, t in point.fixed.items() if n not in ignored)].append(point)
    for key, group in groups.items():
        shared = {name: text for name, text in key if name in ("size", "ranks", "network")}
        yield (
            dict(key),
            group,
            [p for p in points if p.cell.algorithm in DENSE and shared.items() <= p.fixed.items()],
        )


def _slug(fixed: dict[str, str]) -> str:
    plain = "_".join(text for name, text in fixed.items() if name != "network")
    plain = plain.replace(" coordinates", "").replace(",", "").replace(" %", "pct")
    return plain.replace(" ", "")


def _curves(figure: Figure, group: list[_Point], dense: list[_Point], free: str) -> None:
    """Draw time against a quantity, a line for each algorithm and engine; dense in black."""
    label, of = _QUANTITIES[free]
    values = sorted({of(point) for point in group})
    methods = dict.fromkeys(point.method for point in group)
    looks = dict(zip(methods, cycle(product(_MARKERS, _COLOURS))))
    looks |= {name: ("o", colour) for name, colour in _DENSE_COLOURS.items()}
    kinds = [kind for kind in _KINDS if any(point.kind == kind for point in group)]
    figure.set_size_inches(7.3, 0.8 + 3.2 * len(kinds))
    panels = figure.subplots(len(kinds), sharex=True, squeeze=False)
    for (axes,), kind in zip(panels, kinds, strict=True):
        times: dict[tuple[str, str], dict[float, list[float]]] = {}
        for point in (*(point for point in group if point.kind == kind), *dense):
            line = times.setdefault((point.cell.algorithm, point.cell.engine), defaultdict(list))
            # Dense sums send everything: against density, their lines are horizontal.
            is_flat = free == "density" and point.cell.algorithm in DENSE
            for x in values if is_flat else [of(point)]:
                line[x].append(point.ms)
        first = dict(reversed(times))  # engines by name, of which one line has a label
        for (name, engine), by_x in times.items():
            xs = sorted(by_x)
            marker, colour = looks[name.removeprefix(STEP)]
            axes.plot(
                xs,
                [median(by_x[x]) for x in xs],
                _LINES[engine],
                marker=marker,
                markersize=4,
                color=colour,
                label=name if engine == first[name] else None,
            )
        _finish(axes, values, kind if len(kinds) > 1 else "")
    panels[-1, 0].set_xlabel(label)
    if len({point.cell.engine for point in group}) > 1:
        figure.supxlabel("solid: Gloo, dashed: MPI", fontsize=8, x=0.99, ha="right")


def _finish(axes: Axes, values: list[float], title: str) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(xscale="log", yscale="log", ylabel="time, ms", title=title)
    axes.set_xticks(values, [_tick(value) for value in values])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(**_BESIDE)


def _tick(value: float) -> str:
    """Format a number as the command line takes it: 16Mi for 2^24."""
    for unit, scale in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if value >= scale and value % scale == 0:
            return f"{value / scale:g}{unit}"
    return f"{value:.4g}"


def _breakdown(figure: Figure, group: list[_Point], dense: list[_Point]) -> None:
    """Draw one bar a row: the phases, and the rest of the median time."""
    group = sorted(group, key=lambda p: (p.kind != _KINDS[0], p.cell.algorithm, p.cell.engine))
    figure.set_size_inches(7, 1.6 + 0.26 * len(group))
    axes, left, rows = figure.add_subplot(), np.zeros(len(group)), range(len(group))
    parts = np.array([point.phases_ms for point in group]).T
    for (phase, colour), widths in zip(_PHASE_COLOURS.items(), parts, strict=True):
        bars = axes.barh(rows, widths, left=left, color=colour, label=phase)
        left += widths
    axes.bar_label(bars, [f" {digits(point.ms)}" for point in group], fontsize=7)
    axes.set_yticks(rows, [f"{p.cell.algorithm}  {p.cell.engine}" for p in group], fontsize=8)
    axes.invert_yaxis()
    most = 1.12 * left.max()
    axes.set(xlabel="time, ms", xlim=(0, most))
    for name, colour in _DENSE_COLOURS.items():
        if times := [point.ms for point in dense if point.cell.algorithm == name]:
            beyond = ", off the scale" if min(times) > most else ""
            label = f"{name}: {digits(min(times))}{beyond}"
            axes.axvline(min(times), color=colour, linewidth=1.2, label=label)
    axes.legend(**_BESIDE)
