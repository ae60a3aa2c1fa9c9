"""The output of ``sparcel density``, and the plot of measured fill-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparcel.core._checks import check_type
from sparcel.errors import InputError, optional
from sparcel.tools.analysis.density import (
    Growth,
    delta,
    expected_nnz,
    ranks_until_dense,
    relative_volume,
)

if TYPE_CHECKING:
    from rich.table import Table


def table(size: int, k: int, ranks: int) -> Table:
    """Return the expected sum of k-sparse float32 vectors for 2, 4, 8 … ranks and for ``ranks``."""
    from rich import box
    from rich.table import Table

    result = Table(
        title=f"{k:,} of {size:,} coordinates a rank ({100 * k / size:.3g} %), float32",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in (
        "ranks",
        "coordinates\nof the sum",
        "density\nof the sum",
        "sent, of a dense\nexchange",
    ):
        result.add_column(heading, justify="right")
    result.add_column("")
    most = delta(size)
    for world in sorted({2**i for i in range(1, ranks.bit_length())} | {ranks}):
        nnz = expected_nnz(size, k, world)
        result.add_row(
            f"{world:,}",
            f"{nnz:,.0f}",
            f"{100 * nnz / size:.3g} %",
            f"{100 * relative_volume(size, k, world):.3g} %",
            "dense" if nnz > most else "sparse",
        )
    return result


def summary(size: int, k: int) -> str:
    """Return the text below the table: from how many ranks the sum is dense, and what helps."""
    return (
        f"From {ranks_until_dense(size, k):,} ranks on, expect a dense sum: with more than"
        f" {delta(size):,} coordinates, the whole vector takes fewer bytes than coordinates with"
        " their indices. At least half of a dense exchange is then sent, however few coordinates"
        " each rank sends. If that is too much, send a smaller share, quantise the sum (sparcml"
        " with bits), or keep only its k largest coordinates (gtopk, oktopk).\n"
        "Real gradients fill in more slowly; sparcel.analysis.fill_in measures how fast."
    )


_STYLES = ("-", "--", "-.")


def plot_fill_in(
    measured: Mapping[tuple[float, str], Growth], path: str | Path, title: str = ""
) -> None:
    """Draw the density of the sum against the number of ranks. Needs matplotlib.

    Each density has a colour: a solid line for the first selector, dashed lines for the others, and
    a dotted line for the density expected of random selections. A grey line marks the density from
    which a float32 sum is dense.

    Parameters
    ----------
    measured
        The result of `fill_in`.
    path
        The file to write; its suffix decides the format: ``.svg``, ``.png``, ``.pdf``. The same
        input gives the same bytes.
    title
        Title above the plot.

    Raises
    ------
    InputError
        When there is nothing to draw.
    MissingDependencyError
        When matplotlib is not installed.

    Source: SparCML, Figure 1.
    """
    check_type(measured, Mapping, "measured")
    if not measured:
        raise InputError("plot_fill_in needs at least one growth, got none")
    with optional("plot_fill_in", "plots"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    densities = sorted({density for density, _ in measured}, reverse=True)
    styles = dict(zip(dict.fromkeys(name for _, name in measured), _STYLES, strict=False))
    for (density, name), growth in measured.items():
        colour, label = f"C{densities.index(density)}", f"{100 * density:g} %"
        ranks = range(1, len(growth.nnz) + 1)
        style = styles.get(name, _STYLES[-1])
        axes.plot(ranks, _percent(growth.density), style, color=colour, label=f"{label}, {name}")
        if name == next(iter(styles)):
            chance = _percent(growth.uniform_density)
            axes.plot(ranks, chance, ":", color=colour, label=f"{label}, by chance")
    most = max(100 * delta(growth.size) / growth.size for growth in measured.values())
    axes.axhline(most, color="grey", linewidth=0.8)
    axes.text(1, most, "dense from here on", color="grey", fontsize=8, va="bottom")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="ranks", ylabel="density of the sum, %", ylim=(0, 100), title=title)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    with rc_context({"svg.hashsalt": "sparcel"}):
        undated = {"Date": None} if Path(path).suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=undated)


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]
