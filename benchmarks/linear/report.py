"""The tables and the figures of docs/explanation/linear-measured.md, from its records.

python -m benchmarks.linear.report
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.linear.single_tables import fit_table, reading_table, single_table
from benchmarks.pages.tables import BESIDE, COLOURS, plain, save, subplots, table
from benchmarks.record import RESULTS, Row, rows_of

PAPER = {"posts-reviews": (20.26, 25.75), "urls": (12.65, 23.81)}
"""Speed-ups of Table 2 on GigE, logistic regression on 8 nodes: a whole epoch, communication. Our
sets stand in for Webspam and URL."""

PAPER_RATES = {
    ("urls", 32, "Cray Aries"): (3.52, 3.69),
    ("urls", 8, "Cray Aries"): (1.80, 2.35),
    ("urls", 8, "InfiniBand FDR"): (1.33, 1.80),
    ("urls", 8, "Gigabit Ethernet"): (12.65, 23.81),
    ("posts-reviews", 8, "Cray Aries"): (1.82, 2.40),
    ("posts-reviews", 8, "InfiniBand FDR"): (1.80, 2.46),
    ("posts-reviews", 8, "Gigabit Ethernet"): (20.26, 25.75),
}
"""Speed-ups of Table 2 on each network, as in `PAPER`."""

GIGABIT = 1e9 / 8

DRAWN = (
    *("dense", "dense bf16", "allgather", "auto", "split_allgather, top 0.1 %"),
    *("sharded", "sharded, 8 bits", "sharded, asynchronous"),
)
"""The arms of the figures, in which more would hide one another."""


def of_epoch(row: Row) -> dict[str, float]:
    """Return medians over the epochs of a row, and what an epoch takes on a core of its own."""
    found = {
        name: float(np.median(row[name]))
        for name in ("seconds", "communication_seconds", "cpu_seconds", "bytes")
    }
    found["own_core"] = found["cpu_seconds"] + found["bytes"] / GIGABIT
    return found


def arms_table(rows: list[Row], name: str, nodes: int) -> Iterator[str]:
    """Yield a table of all arms on one set: an epoch, and its ratios to dense float32."""
    columns = (
        *("exchange", "loss", "epoch", "of it communication", "bytes", "× dense epoch"),
        *("× dense communication", "CPU a rank", "× dense, a core for each rank"),
        *("training loss at the end", "accuracy"),
    )
    own = [row for row in rows if (row["set"], row["nodes"]) == (name, nodes)]
    own.sort(key=lambda row: (not row["arm"].startswith("dense"), row["arm"], row["loss"]))
    dense = {row["loss"]: of_epoch(row) for row in own if row["arm"] == "dense"}
    yield from table(columns, (_arm(row, dense) for row in own))


def _arm(row: Row, dense: dict[str, dict[str, float]]) -> Iterator[str]:
    found, base = of_epoch(row), dense.get(row["loss"])
    yield row["arm"]
    yield row["loss"]
    yield f"{found['seconds']:.2f} s"
    yield f"{found['communication_seconds']:.2f} s"
    yield f"{found['bytes'] / 1e6:,.1f} MB"
    yield "" if base is None else f"{base['seconds'] / found['seconds']:.1f}"
    waited = max(found["communication_seconds"], 1e-9)
    yield "" if base is None else f"{base['communication_seconds'] / waited:.1f}"
    yield f"{found['cpu_seconds']:.2f} s"
    yield "" if base is None else f"{base['own_core'] / found['own_core']:.1f}"
    yield f"{row['train_losses'][-1]:.4f}"
    yield ", ".join(f"{100 * share:.1f} %" for share in row["accuracy"].values())


def nodes_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of epochs on 1 to 8 nodes, logistic regression."""
    arms = ("dense", "auto", "sharded", "sharded, asynchronous")
    found = {
        (row["set"], row["nodes"], row["arm"]): of_epoch(row)
        for row in rows
        if row["loss"] == "logistic"
    }
    sets = dict.fromkeys(row["set"] for row in rows)
    nodes = sorted({row["nodes"] for row in rows})

    def cells(name: str, count: int) -> Iterator[str]:
        yield from (name, str(count))
        for arm in arms:
            one = found.get((name, count, arm))
            yield "" if one is None else f"{one['seconds']:.2f} s, {one['bytes'] / 1e6:,.1f} MB"

    places = [
        (name, count) for name in sets for count in nodes if (name, count, "sharded") in found
    ]
    yield from table(("set", "nodes", *arms), (cells(*place) for place in places))


def gathers_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of an iteration of coordinate descent with each gather."""
    names = ("seconds", "communication_seconds", "bytes")
    found = {
        gather: [np.median([r[name] for r in rows if r["gather"] == gather]) for name in names]
        for gather in dict.fromkeys(row["gather"] for row in rows)
    }
    columns = ("gather", "iteration", "of it communication", "bytes")
    ratios = ("× dense iteration", "× dense communication")
    whole, waited, _ = found["dense"]
    cells = (
        (
            *(gather, f"{1e3 * a:.1f} ms", f"{1e3 * b:.1f} ms", f"{c / 1e3:,.1f} kB"),
            *(f"{whole / a:.1f}", f"{waited / b:.1f}"),
        )
        for gather, (a, b, c) in found.items()
    )
    yield from table((*columns, *ratios), cells)


def spark_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of Spark's MLlib beside sparcel, on one node and on several."""
    epochs = {
        (row["nodes"], row["solver"]): row["iteration_seconds"] * row["iterations_an_epoch"]
        for row in rows
    }
    columns = (
        *("nodes", "solver", "iteration", "bytes", "iterations an epoch", "epoch"),
        *("× sparcel", "iterations", "training loss after them", "accuracy"),
    )
    cells = (
        (
            str(row["nodes"]),
            row["solver"],
            f"{row['iteration_seconds']:.3f} s",
            f"{max(row['bytes'], 0) / 1e6:,.1f} MB",
            f"{row['iterations_an_epoch']:.0f}",
            f"{epochs[row['nodes'], row['solver']]:.2f} s",
            f"{epochs[row['nodes'], row['solver']] / epochs[row['nodes'], 'sparcel, SGD']:.1f}",
            str(row["iterations"]),
            f"{row['train_loss']:.4f}",
            f"{100 * row['accuracy']:.1f} %",
        )
        for row in rows
    )
    yield from table(columns, cells)


def rates_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of simulated epochs on each network, with the paper's speed-ups."""
    dense = {(row["set"], row["ranks"]): row for row in rows if row["algorithm"] == "dense"}
    columns = ("network", "set", "ranks", "exchange", "epoch", "of it communication")
    ratios = ("× dense epoch", "× dense communication", "the paper's")
    cells = (
        _rates(row, dense[row["set"], row["ranks"]], network)
        for network in (rows[0]["networks"] if rows else ())
        for row in rows
    )
    yield from table((*columns, *ratios), cells)


def _rates(row: Row, dense: Row, network: str) -> Iterator[str]:
    whole, waited, base, base_waited = (
        float(np.median(one["networks"][network][name]))
        for one in (row, dense)
        for name in ("seconds", "communication_seconds")
    )
    yield from (network, row["set"], str(row["ranks"]), row["algorithm"])
    yield from (f"{1e3 * whole:,.0f} ms", f"{1e3 * waited:,.0f} ms")
    yield from (f"{base / whole:.1f}", f"{base_waited / waited:.1f}")
    paper = PAPER_RATES.get((row["set"], row["ranks"], network), ())
    yield ", ".join(map(str, () if row["algorithm"] in ("dense", "sharded") else paper))


def optimum_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of the ways to one objective: seconds, epochs and bytes."""
    columns = (
        "nodes",
        "solver",
        "objective",
        "reached",
        "epochs",
        "seconds",
        "of it communication",
    )
    cells = (
        (
            str(row["nodes"]),
            row["arm"],
            f"{row['objective']:.6f}",
            "" if "reached" not in row else "yes" if row["reached"] else "no",
            str(row.get("epochs", "")),
            f"{row['seconds']:.1f} s",
            f"{row['communication_seconds']:.1f} s" if row["nodes"] > 1 else "",
            f"{row['bytes'] / 1e6:,.1f} MB" if row["nodes"] > 1 else "",
        )
        for row in rows
    )
    yield from table((*columns, "bytes"), cells)


def memory_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of the most memory that a rank takes, beside its budget."""
    columns = ("set", "training", "ranks", "rows", "vectors", "budget", "peak")
    phases = ("reading", "arranging", "training", "saving", "end")

    def cells(row: Row) -> Iterator[str]:
        yield from (row["set"], row["label"], str(row["ranks"]))
        yield f"{row['parsed_bytes'] / 1e6:.0f} MB"
        yield f"{row['vectors']} × {row['vector_bytes'] / 1e6:.0f} MB"
        yield f"{row['budget_bytes'] / 1e6:.0f} MB"
        yield f"{row['peak_bytes'] / 1e6:.0f} MB"
        for phase in phases:
            yield f"{row['peaks'][phase] / 1e6:.0f}" if phase in row["peaks"] else ""

    yield from table((*columns, *phases), map(cells, rows))


TABLES: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "linear_scd": gathers_table,
    "linear_optimum": optimum_table,
    "linear_spark": spark_table,
    "linear_rates": rates_table,
    "linear_memory": memory_table,
    "linear_single": single_table,
    "linear_fit": fit_table,
    "linear_reading": reading_table,
}
"""The tables of the records that have one each."""


def all_tables() -> Iterator[str]:
    """Yield the lines of all tables of the page."""
    rows = rows_of(RESULTS / "linear_models.json")
    for name in dict.fromkeys(row["set"] for row in rows):
        yield f"\n{name}, paper {PAPER[name]}\n"
        yield from arms_table(rows, name, 8)
    yield "\nnodes\n"
    yield from nodes_table(rows)
    for name, lines in TABLES.items():
        yield f"\n{name}\n"
        yield from lines(rows_of(RESULTS / f"{name}.json"))


def draw(rows: list[Row], name: str) -> None:
    """Draw the loss against time of some arms on 8 nodes."""
    figure, axes = subplots()
    found = {
        row["arm"]: row
        for row in rows
        if (row["set"], row["nodes"], row["loss"]) == (name, 8, "logistic")
    }
    for arm in DRAWN:
        axes.plot(
            np.cumsum(found[arm]["seconds"]), found[arm]["train_losses"], "o-", label=arm, ms=3
        )
    axes.set(xscale="log", xlabel="seconds", ylabel="mean loss of an epoch", title=name)
    plain(axes.xaxis)
    axes.legend(**BESIDE)
    save(figure, f"linear-{name}")


def draw_optimum(rows: list[Row]) -> None:
    """Draw the seconds that each way takes to the same objective, or until it gives up."""
    figure, axes = subplots(size=(6.4, 3.4))
    for place, row in enumerate(rows):
        waited = row.get("communication_seconds", 0.0)
        reached = row.get("reached", True)
        axes.barh(place, row["seconds"], color=COLOURS[0] if reached else "lightgrey")
        axes.barh(place, waited, color=COLOURS[4], left=row["seconds"] - waited)
        text = f" {row['seconds']:.0f} s" + ("" if reached else ", not reached")
        axes.text(row["seconds"], place, text, va="center", fontsize="small")
    names = [f"{row['arm']}, {row['nodes']} node{'s' * (row['nodes'] > 1)}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set(xlabel="seconds (light: communication)", xlim=(0, 680))
    save(figure, "linear-optimum")


def draw_memory(rows: list[Row]) -> None:
    """Draw the most memory that a rank takes, beside the rows and the vectors that it must hold."""
    figure, axes = subplots(size=(6.4, 4))
    names = [f"{row['label']}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}" for row in rows]
    rest = [row["budget_bytes"] - row["parsed_bytes"] for row in rows]
    parsed = [row["parsed_bytes"] / 1e6 for row in rows]
    axes.barh(names, parsed, color=COLOURS[0], label="rows as parsed")
    vectors = [size / 1e6 for size in rest]
    axes.barh(names, vectors, left=parsed, color=COLOURS[4], label="vectors")
    peaks = [row["peak_bytes"] / 1e6 for row in rows]
    axes.plot(peaks, names, "|", color="black", markersize=14, mew=2, label="most memory taken")
    axes.invert_yaxis()
    axes.set(xlabel="MB a rank")
    figure.legend(loc="outside upper right", ncols=3)
    save(figure, "linear-memory")


def draw_all() -> None:
    """Draw the figures."""
    rows = rows_of(RESULTS / "linear_models.json")
    for name in dict.fromkeys(row["set"] for row in rows):
        draw(rows, name)
    draw_optimum(rows_of(RESULTS / "linear_optimum.json"))
    draw_memory(rows_of(RESULTS / "linear_memory.json"))


def main() -> None:
    """Print the tables and draw the figures."""
    print(*all_tables(), sep="\n")
    draw_all()


if __name__ == "__main__":
    main()
