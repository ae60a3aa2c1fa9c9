"""Tables and figures of docs/explanation/two-tiers.md, from the records of `two_tiers.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.network.two_tiers import METHODS, Row
from benchmarks.network.two_tiers_bytes import GRIDS
from benchmarks.pages.tables import BESIDE, plain, save, subplots, table
from benchmarks.record import RESULTS, rows_of

STEPS = ("reduce-scatter inside", "selection", "all-gather across", "all-gather inside", "rest")
COLOURS = dict(zip(METHODS, ("#ee6677", "#ccbb44", "black", "#4477aa", "#228833"), strict=True))
STEP_COLOURS = ("#4477aa", "#66ccee", "#ccbb44", "#228833", "#bbbbbb")


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


def floors_table(rows: Sequence[Row], rate: float) -> Iterator[str]:
    """Yield where the time of the largest vector goes: link, processors, selection."""
    columns = ("", "time", "between nodes", "on the link", "processor time of a rank", "selection")
    largest = [_of(rows, name)[-1] for name in METHODS]
    yield from table(
        columns,
        (
            (
                f"`{row['method']}`",
                f"{row['ms']:.0f} ms",
                f"{row['crossed_bytes'] / 1e6:.1f} MB",
                f"{8e3 * row['crossed_bytes'] / rate:.0f} ms",
                f"{row['cpu_ms']:.0f} ms",
                f"{_selection(row):.0f} ms",
            )
            for row in largest
        ),
    )


def _selection(row: Row) -> float:
    place = {"NaiveAG": 0, "HiTopKComm": 1}.get(row["method"])
    return 0.0 if place is None else float(row["parts_ms"][place])


def steps_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield figure 8 as a table: each step's milliseconds and share."""
    yield from table(
        ("coordinates, density", "time", *STEPS),
        (
            (
                f"{row['size'] / 1e6:g} M, {row['density']:.1%}",
                f"{row['ms']:.0f} ms",
                *(f"{part:.0f} ms, {part / sum(parts):.0%}" for part in parts),
            )
            for row in rows
            for parts in [row["parts_ms"]]
        ),
    )


def before_table(before: Sequence[Row], after: Sequence[Row]) -> Iterator[str]:
    """Yield times and processor times of the two schemes on nodes, before and after the changes."""
    columns = ("", *(f"{row['size'] / 1e6:g} M" for row in _of(before, "2DTAR")))
    yield from table(
        columns,
        (
            (
                f"`{name}`, {what}",
                *(
                    f"{old[key]:.0f} → {new[key]:.0f} ms"
                    for old, new in zip(_of(before, name), _of(after, name), strict=True)
                ),
            )
            for name in ("2DTAR", "HiTopKComm")
            for what, key in (("time", "ms"), ("processor time of a rank", "cpu_ms"))
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
    """Yield the lines of all tables, an empty one between two."""
    times, rate = (
        rows_of(RESULTS / "two_tiers.json"),
        float(_network("two_tiers")["rate_bits_per_s"]),
    )
    yield from (*times_table(times), "")
    yield from (*times_table(rows_of(RESULTS / "two_tiers_100mbit.json")), "")
    yield from (*floors_table(times, rate), "")
    yield from (*before_table(rows_of(RESULTS / "two_tiers_before.json"), times), "")
    yield from (*bytes_table(rows_of(RESULTS / "two_tiers_bytes.json")), "")
    yield from steps_table(rows_of(RESULTS / "two_tiers_steps.json"))


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["method"] == name]


def _network(record: str) -> dict[str, Any]:
    network: dict[str, Any] = json.loads((RESULTS / f"{record}.json").read_text())["network"]
    return network


def draw_all() -> None:
    """Draw the figures."""
    draw_times(rows_of(RESULTS / "two_tiers.json"), _network("two_tiers")["description"])
    draw_steps(
        rows_of(RESULTS / "two_tiers_steps.json"), _network("two_tiers_steps")["description"]
    )


def main() -> None:
    print("\n".join(tables()))
    draw_all()


if __name__ == "__main__":
    main()
