"""Figures of deltas, from the records of `measure.py` and `fleet.py`.

python -m benchmarks.deltas.report
"""

from __future__ import annotations

from benchmarks.pages.tables import BESIDE, COLOURS, plain, save, subplots
from benchmarks.record import RESULTS, Row, rows_of


def draw_bits() -> None:
    """Draw the bits of a changed element against the learning rate, a line for each way."""
    figure, axes = subplots()
    ways: dict[str, list[Row]] = {}
    for row in rows_of(RESULTS / "deltas.json"):
        if row["what"] == "way":
            ways.setdefault(row["way"], []).append(row)
    for way, rows in sorted(ways.items(), key=lambda one: -one[1][-1]["bits"]):
        rates, bits = [row["lr"] for row in rows], [row["bits"] for row in rows]
        axes.plot(rates, bits, "o-", label=way, linewidth=3 if "sparcel" in way else 1.2)
    axes.set(xscale="log", xlabel="learning rate", ylabel="bits for an element that changed")
    axes.set(ylim=(0, 52))
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.legend(**BESIDE)
    save(figure, "deltas_bits")


def draw_fleet() -> None:
    """Draw the time from a step's end until eight servers serve its weights."""
    figure, axes = subplots(size=(6.4, 3.4))
    for place, rate in enumerate(("1gbit", "100mbit")):
        rows = [row for row in rows_of(RESULTS / f"delta_fleet_{rate}.json") if "ms" in row]
        at = [0.3 * place + number for number in range(len(rows))]
        name = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}[rate]
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
    save(figure, "delta_fleet")


def draw_all() -> None:
    """Draw the figures."""
    draw_bits()
    draw_fleet()


if __name__ == "__main__":
    draw_all()
