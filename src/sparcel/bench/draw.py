"""Draws the panels of the plots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from sparcel.bench.contenders import STEP
from sparcel.bench.phases import PHASES
from sparcel.bench.report import digits
from sparcel.bench.results import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = {"gloo": "-", "mpi": "--"}
_MARKERS = {"gloo": "o", "mpi": "s"}
_DENSE_COLOURS = {"dense fp32": "black", "dense bf16": "grey"}
_COLOURS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#994f00"),
    *("#44bb99", "#7744aa", "#0c7bdc", "#bbcc33", "#ffaabb", "#882255", "#999933"),
)
_PHASE_COLOURS = ("#4477aa", "#66ccee", "#ccbb44", "#228833", "#bbbbbb")
_KINDS = ("sums and exchanges", "whole steps")


@dataclass(frozen=True)
class Point:
    """A cell, with the number of ranks and the network on which it was measured."""

    ranks: int
    network: str
    cell: Cell

    @property
    def kind(self) -> str:
        """Title of the panel that shows the cell."""
        return _kind(self.cell.algorithm)


@dataclass(frozen=True)
class Quantity:
    """The quantity on a plot's horizontal axis: its name, label, and value for a cell."""

    name: str
    label: str
    of: Callable[[Point], float]


def curves(figure: Figure, group: list[Point], dense: list[Point], quantity: Quantity) -> None:
    """Draw time against a quantity, a line for each algorithm and engine; dense in black."""
    kinds = [kind for kind in _KINDS if any(point.kind == kind for point in group)]
    figure.set_size_inches(1.7 + 5.6 * len(kinds), 5)
    names = list(dict.fromkeys(point.cell.algorithm for point in group))
    methods = list(dict.fromkeys(name.removeprefix(STEP) for name in names))
    first = None
    for place, kind in enumerate(kinds):
        first = axes = figure.add_subplot(1, len(kinds), place + 1, sharey=first)
        for name in (name for name in names if _kind(name) == kind):
            colour = _COLOURS[methods.index(name.removeprefix(STEP)) % len(_COLOURS)]
            _lines(axes, [p for p in group if p.cell.algorithm == name], quantity, colour)
        for name, colour in _DENSE_COLOURS.items():
            _baseline(axes, [p for p in dense if p.cell.algorithm == name], quantity, colour)
        _finish(axes, kind if len(kinds) > 1 else "", quantity, group)
    if len({point.cell.engine for point in group}) > 1:
        figure.supxlabel("solid: Gloo, dashed: MPI", fontsize=8, x=0.99, ha="right")


def _lines(axes: Axes, points: list[Point], quantity: Quantity, colour: str) -> None:
    """Draw one algorithm, a line for each engine."""
    for engine in dict.fromkeys(point.cell.engine for point in points):
        times: dict[float, list[float]] = defaultdict(list)
        for point in points:
            if point.cell.engine == engine:
                times[quantity.of(point)].append(1000 * point.cell.median)
        where = sorted(times)
        first = engine == points[0].cell.engine
        axes.plot(
            where,
            [median(times[x]) for x in where],
            _LINES[engine],
            marker=_MARKERS[engine],
            markersize=4,
            color=colour,
            label=points[0].cell.algorithm if first else None,
        )


def _baseline(axes: Axes, points: list[Point], quantity: Quantity, colour: str) -> None:
    """Draw a dense baseline; against density it is a horizontal line."""
    if not points or quantity.name != "density":
        if points:
            _lines(axes, points, quantity, colour)
        return
    for engine in dict.fromkeys(point.cell.engine for point in points):
        height = median(1000 * p.cell.median for p in points if p.cell.engine == engine)
        label = points[0].cell.algorithm if engine == points[0].cell.engine else None
        axes.axhline(height, linestyle=_LINES[engine], color=colour, linewidth=1.2, label=label)


def _finish(axes: Axes, title: str, quantity: Quantity, group: list[Point]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    values = sorted({quantity.of(point) for point in group})
    axes.set(xscale="log", yscale="log", xlabel=quantity.label, ylabel="time, ms", title=title)
    axes.set_xticks(values, [_tick(value) for value in values])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _tick(value: float) -> str:
    """Format a number as the command line takes it: 16Mi for 2^24."""
    for unit, scale in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if value >= scale and value % scale == 0:
            return f"{value / scale:g}{unit}"
    return f"{value:.4g}"


def breakdown(figure: Figure, group: list[Point], dense: list[Point]) -> None:
    """Draw one bar a row: the phases, and the rest of the median time."""
    group = sorted(group, key=lambda p: (p.kind != _KINDS[0], p.cell.algorithm, p.cell.engine))
    figure.set_size_inches(8.5, 1.6 + 0.26 * len(group))
    axes = figure.add_subplot()
    left = [0.0] * len(group)
    labels = [f"{p.cell.algorithm}  {p.cell.engine}" for p in group]
    for phase, colour in zip((*PHASES, "other"), _PHASE_COLOURS, strict=True):
        widths = [_phase_ms(point.cell, phase) for point in group]
        axes.barh(range(len(group)), widths, left=left, color=colour, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, point in enumerate(group):
        axes.text(
            left[place], place, f" {digits(1000 * point.cell.median)}", va="center", fontsize=7
        )
    axes.set_yticks(range(len(group)), labels, fontsize=8)
    axes.invert_yaxis()
    longest = max(left)
    axes.set(xlabel="time, ms", xlim=(0, 1.12 * longest))
    for name, colour in _DENSE_COLOURS.items():
        times = [1000 * p.cell.median for p in dense if p.cell.algorithm == name]
        if times:
            label = f"{name}: {digits(min(times))}"
            if min(times) <= 1.12 * longest:
                axes.axvline(min(times), color=colour, linewidth=1.2, label=label)
            else:
                axes.plot([], [], color=colour, label=f"{label}, off the scale")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _phase_ms(cell: Cell, phase: str) -> float:
    if phase != "other":
        # Phases come from separate runs, so by noise their sum may exceed the median.
        whole = sum(cell.phases[name] for name in PHASES)
        return 1000 * cell.phases[phase] * min(1.0, cell.median / whole if whole else 1.0)
    return 1000 * max(0.0, cell.median - sum(cell.phases[name] for name in PHASES))


def _kind(algorithm: str) -> str:
    return _KINDS[algorithm.startswith(STEP)]
