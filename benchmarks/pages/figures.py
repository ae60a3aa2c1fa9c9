"""The figures of docs/figures, from the records.

    python -m benchmarks.pages.figures

draws all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from cycler import cycler
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.network import commlib_report, two_tiers
from benchmarks.network.scale import described
from benchmarks.record import RESULTS, Row, grouped, recorded, rows_of
from benchmarks.training import frontier_report as frontier
from benchmarks.training import lab_training
from sparcel.tools.bench.contenders import DENSE as DENSE_ROWS
from sparcel.tools.bench.plot import plot
from sparcel.tools.bench.results import Results

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


def style() -> None:
    """Set what all figures have in common, which are to be read at 720 pixels and less."""
    plt.rcdefaults()  # a user's own style would change the figures
    plt.rcParams.update(
        {
            "axes.prop_cycle": cycler(linestyle=["-", "--"]) * cycler(color=COLOURS),
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
    style()
    return plt.subplots(rows, columns, figsize=size, **options)


def plain(axis: Axis) -> None:
    """Write the numbers of a logarithmic axis plainly, at as many places as there is room for."""
    low, high = axis.get_view_interval()
    subs: Sequence[float] = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=subs if high < 1000 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


BESIDE_CURVES: dict[str, tuple[Row, Row]] = {
    "PowerSGD": ({"xytext": (4, 4)}, {"xytext": (9, -14)}),
    "sparcel": ({"xytext": (4, 4)}, {"xytext": (9, 4)}),
    "at 10 %": (
        {"xytext": (-5, 2), "ha": "right"},
        {"xytext": (0, -15), "va": "top", "ha": "center"},
    ),
    "bfloat16": ({"xytext": (4, 4)}, {"xytext": (7, 6)}),
}
"""Where a curve's name is beside its start, and what it tells beside its end."""
FRONT_COLOURS = {"PowerSGD": POWERSGD, "bfloat16": ROUNDED}


def front() -> Figure:
    """Draw the front page's picture: when each method ends, and how far above DDP alone."""
    base, told = lab_training.front(lab_training.lab_rows())
    wanted = math.exp(base["held_out"][-1][-1])
    figure, axes = subplots(size=(5.4, 4))
    axes.axhline(wanted, color=DENSE, linewidth=1, linestyle=":")
    axes.text(2.6, wanted - 0.3, "where plain DDP ends", va="top")
    for name, (row, text) in told.items():
        colour = FRONT_COLOURS.get(name, SPARCEL)
        write = partial(axes.annotate, color=colour, textcoords="offset points")
        points = [(second / 60, math.exp(loss)) for _, second, loss in row["held_out"]]
        axes.plot(*zip(*points, strict=True), color=colour, lw=4.5 if name == "sparcel" else 2.5)
        axes.plot(*points[-1], "o", color=colour, markersize=9)
        at_start, at_end = BESIDE_CURVES[name]
        write(name, points[0], weight="bold", **at_start)
        write(text.removeprefix("ends ").replace(" after ", "\n"), points[-1], **at_end)
    axes.set(xlabel="minutes of training", ylabel="perplexity (lower is better)")
    axes.set(xlim=(0, 5.8), ylim=(73, 92.5))
    axes.set_title("Training over a slow network: 8 nodes, 100 Mbit/s", loc="center")
    return figure


RUNS = {
    "dense": ("dense", "s", DENSE),
    "bf16": ("bfloat16", "s", ROUNDED),
    frontier.DEFAULT: ("sparcel's default", "o", SPARCEL),
    frontier.FOUR_BITS: ("sparcel, everything in 4 bits", "^", SPARCEL),
    frontier.SPARSER: ("sparcel, 10 %", "D", SPARCEL),
    frontier.SCALECOM: ("scalecom, 10 %", "v", SPARCEL),
}
"""Labels, markers and colours of the runs in the figure of losses and bytes."""


def frontier_words() -> Figure:
    """Draw the loss of words at the end against the share of the bytes, means over the seeds."""
    figure, axes = subplots()
    rows = frontier.all_rows()
    runs = {row["run"]: None for row in rows}
    ranks = [run for run in runs if re.fullmatch(r"powersgd,\d+", run)]
    places = {
        run: (100 * mean(row["share"] for row in found), mean(row["loss"] for row in found))
        for run in (*RUNS, *ranks)
        if (found := frontier.usual_of(rows, run, "words"))
    }
    for run, (label, marker, colour) in RUNS.items():
        axes.plot(*places[run], marker, color=colour, label=label)
    hooks = sorted(places[run] for run in ranks)
    axes.plot(*zip(*hooks, strict=True), "o-", color=POWERSGD, label="PowerSGD, by rank")
    for run in ranks:
        offset = {"xytext": (6, 3), "textcoords": "offset points", "color": POWERSGD}
        axes.annotate(run.removeprefix("powersgd,"), places[run], **offset)
    axes.set(xscale="log", xlabel="bytes, % of dense float32", ylabel="loss at the end")
    axes.set(xlim=(2.5, 150), title="words")
    plain(axes.xaxis)
    axes.legend()
    return figure


BENCH_SHOWN = (
    *DENSE_ROWS,
    *("sparse_coo", "allgather", "recursive_doubling", "split_allgather", "gtopk", "oktopk"),
    *("step:dense", "step:mstopk", "step:topk", "step:gtopk", "step:scalecom"),
)
"""Rows of ``sparcel bench`` that figures show, over Gloo: of all kinds, and none that is gone."""
BENCH = {
    "bench_density": "density_16777216_uniform_8ranks",
    "bench_breakdown": "breakdown_16777216_0.781pct_uniform_8ranks",
}
"""The figures that ``sparcel bench plot`` draws, by our names."""


def draw_bench(folder: Path) -> None:
    results = Results.load(RESULTS / "bench_8_nodes_1gbit.json")
    results.cells = [
        cell for cell in results.cells if cell.engine == "gloo" and cell.algorithm in BENCH_SHOWN
    ]
    style()
    with TemporaryDirectory() as place:
        drawn = {path.stem: path for path in plot([results], Path(place), ".svg")}
        for name, stem in BENCH.items():
            (folder / f"{name}.svg").write_bytes(drawn[stem].read_bytes())


EXACT = "dense", "allgather", "recursive_doubling", "halving_doubling"
ALGORITHMS = dict(
    zip((*EXACT, "gtopk", "oktopk", "hitopk", "scalecom"), (DENSE, *COLOURS), strict=False)
)
"""Colours of the algorithms in the figure: of those that add all, and of those that select."""


def scale() -> Figure:
    """Draw the times on both networks against the number of ranks."""
    results = recorded("scale")
    figure, both = subplots(2, size=(6.4, 6.6), sharex=True)
    for axes, key, network in zip(
        both, ("ethernet_s", "nodes_s"), results["networks"], strict=True
    ):
        for name, colour in ALGORITHMS.items():
            rows = [row for row in results["rows"] if row["algorithm"] == name]
            ranks = [row["ranks"] for row in rows]
            line = "o--" if name in EXACT else "o-"
            axes.plot(ranks, [1000 * row[key] for row in rows], line, color=colour, label=name)
        axes.set(xscale="log", yscale="log", ylabel="ms")
        axes.set_title(described(results["networks"][network]).replace("node: ", "node:\n"))
        plain(axes.yaxis)
        axes.set_xticks(ranks, ranks)
        axes.minorticks_off()
    both[1].set(xlabel="ranks")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def linear_optimum() -> Figure:
    """Draw the seconds that each way takes to the same objective, or until it gives up."""
    rows = rows_of("linear_optimum")
    figure, axes = subplots(size=(6.4, 3.4))
    for place, row in enumerate(rows):
        waited = row.get("communication_seconds", 0.0)
        reached = row.get("reached", True)
        axes.barh(place, row["seconds"], color=COLOURS[0] if reached else "lightgrey")
        axes.barh(place, waited, color=COLOURS[3], left=row["seconds"] - waited)
        text = f" {row['seconds']:.0f} s" + ("" if reached else ", not reached")
        axes.text(row["seconds"], place, text, va="center", fontsize="small")
    names = [f"{row['arm']}, {row['nodes']} node{'s' * (row['nodes'] > 1)}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set(xlabel="seconds (yellow: communication)", xlim=(0, 680))
    return figure


def deltas_bits() -> Figure:
    """Draw the bits of a changed element against the learning rate, a line for each way."""
    figure, axes = subplots()
    ways = grouped((row for row in rows_of("deltas") if row["what"] == "way"), "way")
    for way, rows in sorted(ways.items(), key=lambda one: -one[1][-1]["bits"]):
        rates, bits = [row["lr"] for row in rows], [row["bits"] for row in rows]
        axes.plot(rates, bits, "o-", label=way, linewidth=3 if "sparcel" in way else 1.2)
    axes.set(xscale="log", xlabel="learning rate", ylabel="bits for an element that changed")
    axes.set(ylim=(0, 52))
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.legend(**BESIDE)
    return figure


def delta_fleet() -> Figure:
    """Draw the time from a step's end until eight servers serve its weights."""
    figure, axes = subplots(size=(6.4, 3.4))
    for place, (rate, name) in enumerate({"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}.items()):
        rows = [row for row in rows_of(f"delta_fleet_{rate}") if "ms" in row]
        at = [0.3 * place + number for number in range(len(rows))]
        times = [row["ms"] for row in rows]  # points, as a logarithmic axis has no zero for bars
        axes.plot(times, at, "os"[place], color=COLOURS[place], markersize=8, label=name)
        for height, row in zip(at, rows, strict=True):
            axes.text(row["ms"], height, f"   {row['ms']:,.0f}", va="center", fontsize="small")
    axes.set_yticks([height - 0.15 for height in at], [row["transport"] for row in rows])
    for number in range(1, len(rows)):
        axes.axhline(number - 0.35, color="lightgrey", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(50, 60_000), xlabel="ms from the step to all servers")
    plain(axes.xaxis)
    axes.legend(loc="upper right")
    return figure


def commlib_breakdown() -> Figure:
    """Draw stacked bars, as CommLib's Figure 1: systems side by side at each resolution."""
    report, rows = commlib_report, commlib_report.recorded()
    systems = [
        one for kind in ("existing", "throughput") for one in report.of_kind(rows, kind).values()
    ]
    names = [f"{row['label']}{'' if row['kind'] == 'existing' else ', ours'}" for row in systems]
    figure, all_axes = subplots(1, len(report.PAPER_TABLE_3), size=(6.4, 4.4), sharey=True)
    for axes, size in zip(all_axes, report.PAPER_TABLE_3, strict=True):
        below = [0.0] * len(systems)
        parts = [report.step_parts(report.warm(row, size)) for row in systems]
        for part in report.PARTS:
            heights = [one[part] for one in parts]
            axes.bar(names, heights, bottom=below, label=part)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        axes.set(title=f"{size} × {size} pixels")
        axes.tick_params("x", rotation=90)
    all_axes[0].set(ylabel="ms a step")
    all_axes[-1].legend()
    return figure


def commlib_training() -> Figure:
    """Draw the trainings' accuracy by seconds."""
    figure, axes = subplots()
    trainings = commlib_report.of_kind(commlib_report.recorded(), "training")
    for label, row in trainings.items():
        seconds = list(accumulate(one["seconds"] for one in row["epochs"]))
        axes.plot(seconds, [100 * one["accuracy"] for one in row["epochs"]], label=label, lw=1)
    axes.set(xlabel="seconds", ylabel="accuracy, %")
    axes.legend(**BESIDE)
    return figure


METHODS = dict(
    zip(two_tiers.METHODS, ("#d62728", "#d4b106", "black", "#3a6fb0", "#2a8a3a"), strict=True)
)
STEPS = {
    "reduce-scatter inside": "#3a6fb0",
    "selection": "#d62728",
    "all-gather across": "#d4b106",
    "all-gather inside": "#2a8a3a",
    "rest": "#bbbbbb",
}
"""Colours of CommLib's figures 7 and 8."""


def two_tiers_times() -> Figure:
    """Draw figure 7."""
    record = recorded("two_tiers")
    figure, axes = subplots()
    for name, colour in METHODS.items():
        own = [row for row in record["rows"] if row["method"] == name]
        sizes, times = [row["size"] / 1e6 for row in own], [row["ms"] for row in own]
        axes.plot(sizes, times, marker="o", markersize=4, color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="coordinates, millions", ylabel="time, ms")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set(title=record["network"]["description"])
    plain(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def two_tiers_steps() -> Figure:
    """Draw figure 8."""
    record = recorded("two_tiers_steps")
    rows, title = record["rows"], record["network"]["description"]
    figure, axes = subplots(size=(6.4, 2.8))
    names = [f"{row['size'] / 1e6:g} M, {row['density']:.1%}" for row in rows]
    left = [0.0] * len(rows)
    for place, (step, colour) in enumerate(STEPS.items()):
        widths = [row["parts_ms"][place] for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=step)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="time of an average rank, ms", title=title)
    axes.legend(**BESIDE)
    return figure


DRAWN: dict[str, Callable[[], Figure]] = {
    "front": front,
    "frontier_words": frontier_words,
    "scale": scale,
    "linear-optimum": linear_optimum,
    "deltas_bits": deltas_bits,
    "delta_fleet": delta_fleet,
    "commlib_breakdown": commlib_breakdown,
    "commlib_training": commlib_training,
    "two_tiers": two_tiers_times,
    "two_tiers_steps": two_tiers_steps,
}
"""By the names of their files."""


def draw_all(folder: Path) -> None:
    """Write the figures, the same bytes for the same figure."""
    for name, draw in DRAWN.items():
        figure = draw()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
    draw_bench(folder)


if __name__ == "__main__":
    draw_all(FIGURES)
