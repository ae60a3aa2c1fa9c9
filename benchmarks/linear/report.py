"""The tables of docs/records/linear.md, from their records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.pages.tables import table
from benchmarks.record import Row, grouped, rows_of

PAPER_RATES = {
    ("urls", 32, "Cray Aries"): (3.52, 3.69),
    ("urls", 8, "Cray Aries"): (1.80, 2.35),
    ("urls", 8, "InfiniBand FDR"): (1.33, 1.80),
    ("urls", 8, "Gigabit Ethernet"): (12.65, 23.81),
    ("posts-reviews", 8, "Cray Aries"): (1.82, 2.40),
    ("posts-reviews", 8, "InfiniBand FDR"): (1.80, 2.46),
    ("posts-reviews", 8, "Gigabit Ethernet"): (20.26, 25.75),
}
"""Speed-ups of Table 2 on each network, logistic regression: a whole epoch, communication. Our sets
stand in for Webspam and URL."""

SHOWN = {
    "urls": (
        *("dense", "dense over columns that occur", "auto", "split_allgather, top 0.1 %"),
        *("sharded", "sharded, 8 bits"),
    ),
    "posts-reviews": ("dense", "dense over columns that occur", "auto", "sharded"),
}
"""The arms of each set in the table; the record has more."""

MEMORY = {("text", 1), ("cache", 1), ("estimator", 1), ("text, sharded", 4), ("cache, sharded", 4)}
"""The trainings of the table of memory, and their ranks."""


def of_epoch(row: Row) -> tuple[float, float]:
    """Return the median seconds and bytes of the epochs of a row."""
    return float(np.median(row["seconds"])), float(np.median(row["bytes"]))


def logistic(rows: list[Row], name: str, nodes: int) -> dict[str, Row]:
    """Return the rows of logistic regression on a set, by their arms."""
    place = (name, nodes, "logistic")
    return {r["arm"]: r for r in rows if (r["set"], r["nodes"], r["loss"]) == place}


def arms_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of epochs on eight nodes, and their ratios to dense ones."""
    columns = ("set", "exchange", "epoch", "bytes", "× dense", "loss")
    cells = []
    for name, arms in SHOWN.items():
        own = logistic(rows, name, 8)
        dense, _ = of_epoch(own["dense"])
        for arm in arms:
            seconds, sent = of_epoch(own[arm])
            cells.append(
                (
                    *(name, arm, f"{seconds:.2f} s", f"{sent / 1e6:,.1f} MB"),
                    *(f"{dense / seconds:.1f}", f"{own[arm]['train_losses'][-1]:.4f}"),
                )
            )
    yield from table(columns, cells)


def gathers_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of an iteration of coordinate descent with each gather."""
    names = ("seconds", "communication_seconds", "bytes")
    found = {
        gather: [np.median([r[name] for r in rows if r["gather"] == gather]) for name in names]
        for gather in dict.fromkeys(row["gather"] for row in rows)
        if gather in ("dense", "sparse", "values", "nothing")
    }
    whole, waited, _ = found["dense"]
    cells = (
        (
            *(gather, f"{1e3 * a:.1f} ms", f"{c / 1e3:,.1f} kB"),
            *(f"{whole / a:.1f}", f"{waited / b:.1f}"),
        )
        for gather, (a, b, c) in found.items()
    )
    yield from table(
        ("gather", "iteration", "bytes", "× dense iteration", "× dense communication"), cells
    )


def spark_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of Spark's MLlib beside sparcel, on eight nodes."""
    own = [row for row in rows if row["nodes"] == 8]
    epochs = [row["iteration_seconds"] * row["iterations_an_epoch"] for row in own]
    columns = ("solver", "epoch", "× sparcel", "loss", "accuracy")
    cells = (
        (
            *(row["solver"], f"{epoch:.2f} s", f"{epoch / epochs[0]:.1f}"),
            *(f"{row['train_loss']:.4f}", f"{100 * row['accuracy']:.1f} %"),
        )
        for row, epoch in zip(own, epochs, strict=True)
    )
    yield from table(columns, cells)


def rates_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of speed-ups over dense on simulated networks, with the paper's."""
    found = {(row["set"], row["ranks"], row["algorithm"]): row["networks"] for row in rows}
    ratios = ("× dense epoch", "× dense communication", "the paper's", "`sharded`")
    cells = []
    for (name, ranks, network), paper in PAPER_RATES.items():
        if name != "urls" and network != "Gigabit Ethernet":
            continue
        algorithm = "recursive_doubling" if ranks == 32 else "split_allgather"
        whole, waited = (
            np.array([np.median(found[name, ranks, one][network][what]) for one in of])
            for what in ("seconds", "communication_seconds")
            for of in [("dense", algorithm, "sharded")]
        )
        sharded = f"{whole[0] / whole[2]:.1f}, {waited[0] / waited[2]:.1f}"
        each = (f"{whole[0] / whole[1]:.1f}", f"{waited[0] / waited[1]:.1f}")
        cells.append((network, name, algorithm, *each, f"{paper[0]}, {paper[1]}", sharded))
    yield from table(("network", "set", "exchange", *ratios), cells)


def optimum_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of the ways that came to one objective: epochs, seconds and bytes."""
    columns = ("nodes", "solver", "objective", "epochs", "seconds", "bytes")
    cells = (
        (
            *(str(row["nodes"]), row["arm"], f"{row['objective']:.6f}"),
            *(str(row.get("epochs", "")), f"{row['seconds']:.1f} s"),
            f"{row['bytes'] / 1e6:,.1f} MB" if row["nodes"] > 1 else "",
        )
        for row in rows
        if row.get("reached", True) and "asynchronous" not in row["arm"]
    )
    yield from table(columns, cells)


def memory_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of the most memory that a rank takes, beside its budget."""
    cells = (
        (
            *(row["label"], str(row["ranks"])),
            *(f"{row[name] / 1e6:.0f} MB" for name in ("budget_bytes", "peak_bytes")),
        )
        for row in rows
        if (row["label"], row["ranks"]) in MEMORY
    )
    yield from table(("training", "ranks", "budget", "peak"), cells)


def single_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of one process: epochs beside scikit-learn and Vowpal Wabbit."""
    own = grouped((row for row in rows if "accuracy" in row), "contender")
    left_out = ("l2 1e-07", "batch 8000", "batch 1000, l2 0, 2 threads")
    cells = []
    for name, turns in own.items():
        if any(part in name for part in left_out):
            continue
        epochs = [np.median(row["seconds"]) for row in turns]
        each = np.array(epochs) / turns[0]["entries"] * 1e9
        before = float(np.median([row["before_s"] for row in turns]))
        cells.append(
            (
                name,
                f"{np.median(epochs):.3f} s",
                f"{np.median(each):.1f}",
                f"{before:.2f} s",
                f"{100 * turns[0]['accuracy'][-1]:.2f} %",
            )
        )
    yield from table(("contender", "epoch", "ns an entry", "before", "accuracy after 5"), cells)


def fit_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of whole fits, in seconds of the processor."""
    columns = ("contender", "processor", "accuracy")
    cells = (
        (
            name,
            f"{min(own['cpu_seconds'] for own in turns):.2f} s",
            f"{100 * turns[0]['accuracy']:.2f} %",
        )
        for name, turns in grouped(rows, "contender").items()
    )
    yield from table(columns, cells)


def reading_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table of ways to read rows, in seconds of the processor."""
    columns = ("reading", "file", "processor", "an entry")
    cells = []
    for name, turns in grouped(rows, "contender").items():
        least = min(own["cpu_seconds"] for own in turns)
        size, entries = turns[0]["bytes"], turns[0]["entries"]
        each = least / entries * 1e9
        cells.append((name, f"{size / 1e6:.0f} MB", f"{least:.2f} s", f"{each:.0f} ns"))
    yield from table(columns, cells)


TABLES: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "linear_models": arms_table,
    "linear_scd": gathers_table,
    "linear_optimum": optimum_table,
    "linear_spark": spark_table,
    "linear_rates": rates_table,
    "linear_memory": memory_table,
    "linear_single": single_table,
    "linear_fit": fit_table,
    "linear_reading": reading_table,
}
"""The tables of the page, by their records."""


def all_tables() -> Iterator[str]:
    """Yield the lines of all tables of the page."""
    for name, lines in TABLES.items():
        yield from lines(rows_of(name))
