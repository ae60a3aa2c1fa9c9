"""Tables and figures of docs/records/two-tiers.md, from the records of `two_tiers.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.network.two_tiers import METHODS
from benchmarks.network.two_tiers_bytes import GRIDS
from benchmarks.pages.tables import BESIDE, plain, save, subplots, table
from benchmarks.record import Row, recorded, rows_of

STEPS = ("reduce-scatter inside", "selection", "all-gather across", "all-gather inside", "rest")
COLOURS = dict(zip(METHODS, ("#d62728", "#d4b106", "black", "#3a6fb0", "#2a8a3a"), strict=True))
STEP_COLOURS = ("#3a6fb0", "#d62728", "#d4b106", "#2a8a3a", "#bbbbbb")


def times_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield figure 7 as a table: medians, and the multiple of HiTopKComm's."""
    columns = [f"{row['size'] / 1e6:g} M" for row in rows if row["method"] == METHODS[0]]
    best = [row["ms"] for row in rows if row["method"] == "HiTopKComm"]
    yield from table(
        ("", *columns),
        (
            (
                f"`{name}`",
                *(f"{row['ms']:.0f} ms, {row['ms'] / least:.1f}×" for row, least in pairs),
            )
            for name in METHODS
            for pairs in [zip(_of(rows, name), best, strict=True)]
        ),
    )


def bytes_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the bytes that cross the busiest node's link for each coordinate."""
    found = {(row["method"], row["nodes"], row["ranks_per_node"]): row["bytes"] for row in rows}
    yield from table(
        ("", *(f"{nodes} × {here}" for nodes, here in GRIDS)),
        ((f"`{name}`", *(f"{found[name, *grid]:.2f}" for grid in GRIDS)) for name in METHODS),
    )


def draw_times(rows: Sequence[Row], network: str) -> None:
    """Draw figure 7."""
    figure, axes = subplots()
    for name in METHODS:
        own = _of(rows, name)
        sizes, times = [row["size"] / 1e6 for row in own], [row["ms"] for row in own]
        axes.plot(sizes, times, marker="o", markersize=4, color=COLOURS[name], label=name)
    axes.set(xscale="log", yscale="log", xlabel="coordinates, millions", ylabel="time, ms")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set(title=network)
    plain(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, "two_tiers")


def draw_steps(rows: Sequence[Row], network: str) -> None:
    """Draw figure 8."""
    figure, axes = subplots(size=(6.4, 2.8))
    names = [f"{row['size'] / 1e6:g} M, {row['density']:.1%}" for row in rows]
    left = [0.0] * len(rows)
    for place, (step, colour) in enumerate(zip(STEPS, STEP_COLOURS, strict=True)):
        widths = [row["parts_ms"][place] for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=step)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="time of an average rank, ms", title=network)
    axes.legend(**BESIDE)
    save(figure, "two_tiers_steps")


def tables() -> Iterator[str]:
    """Yield the lines of both tables, an empty one between them."""
    yield from (*times_table(rows_of("two_tiers")), "")
    yield from bytes_table(rows_of("two_tiers_bytes"))


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["method"] == name]


def draw_all() -> None:
    """Draw the figures."""
    for draw, name in ((draw_times, "two_tiers"), (draw_steps, "two_tiers_steps")):
        record = recorded(name)
        draw(record["rows"], record["network"]["description"])


if __name__ == "__main__":
    print("\n".join(tables()))
    draw_all()
