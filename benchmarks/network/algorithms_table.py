"""Print the table of docs/records/papers.md, and draw docs/figures/scale.svg.

Both are of the record of `scale.py`. The table, of words, has the papers' closed forms, too; the
figure is of times.

python -m benchmarks.network.scale --output benchmarks/results/scale.json
python -m benchmarks.network.algorithms_table
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import log2

from benchmarks.pages.tables import COLOURS, DENSE, plain, save, subplots, table
from benchmarks.record import recorded

EXACT = "dense", "allgather", "recursive_doubling", "halving_doubling"
DRAWN = dict(
    zip((*EXACT, "gtopk", "oktopk", "hitopk", "scalecom"), (DENSE, *COLOURS), strict=False)
)
"""Colours of the algorithms in the figure: of those that add all, and of those that select."""


PAPERS: dict[str, Callable[[float, float, float], float]] = {
    "dense": lambda p, n, k: 2 * n * (p - 1) / p,
    "allgather": lambda p, n, k: 2 * k * (p - 1),
    "recursive_doubling": lambda p, n, k: 2 * k * (p - 1),
    "split_allgather": lambda p, n, k: (2 * k + n) * (p - 1) / p,
    "gtopk": lambda p, n, k: 2 * k * log2(p),
    "oktopk": lambda p, n, k: 6 * k * (p - 1) / p,
    "hitopk": lambda p, n, k: (
        ((group(p) - 1) * n + (p / group(p) - 1) * k + (group(p) - 1) * p / group(p) * k) / group(p)
    ),
}
"""The papers' closed forms, for P ranks and k of n coordinates, in words of 4 bytes.

If a form is an interval, its end for indices that hardly overlap. They are of Ok-Topk's table 1,
but those of SparCML's section 5.3.1 (`recursive_doubling`) and CommLib's equations 7, 9 and 10
(`hitopk`).
"""


def group(p: float) -> float:
    """Return the number of ranks a node in `scale.py`."""
    return min(8, p // 2)


def tables() -> Iterator[str]:
    """Yield the lines of the table of words."""
    results = recorded("scale")
    size, count = results["size"], results["count"]
    found = {(row["algorithm"], row["ranks"]): row for row in results["rows"]}
    names, ranks = dict.fromkeys(name for name, _ in found), sorted({p for _, p in found})

    def words(name: str, p: int) -> str:
        paper = PAPERS[name](p, size, count) / count if name in PAPERS else None
        return compared(found[name, p]["bytes"] / 4 / count, paper)

    rows = (
        (f"`{name}`", *(words(name, p) if (name, p) in found else "" for p in ranks))
        for name in names
    )
    return table(("", *(f"P = {p}" for p in ranks)), rows)


def rounds_of_oktopk() -> str:
    """Return the sentence on its rounds, and on those of the form in the paper's table 1."""
    rows = [row for row in recorded("scale")["rows"] if row["algorithm"] == "oktopk"]
    ranks = [row["ranks"] for row in rows]
    forms = (2 * p + 2 * log2(p) for p in ranks)
    ours, on, theirs = map(listed, ((row["rounds"] for row in rows), ranks, forms))
    return f"`oktopk` takes {ours} rounds on {on} ranks, where the paper's form has {theirs}."


def listed(numbers: Iterable[float]) -> str:
    """Join whole numbers by commas, and the last by "and"."""
    *first, last = (f"{one:.0f}" for one in numbers)
    return f"{', '.join(first)} and {last}"


def described(network: dict[str, float]) -> str:
    """Describe the links of a network."""
    text = "{:g} Gbit/s and {:g} µs a message".format(
        network["bandwidth"] * 8 / 1e9, network["latency_s"] * 1e6
    )
    if network["ranks_per_node"] == 1:
        return text
    return "{:g} ranks a node: {} between nodes, {:g} Gbit/s and {:g} µs inside".format(
        network["ranks_per_node"],
        text,
        network["node_bandwidth"] * 8 / 1e9,
        network["node_latency_s"] * 1e6,
    )


def compared(ours: float, paper: float | None) -> str:
    """Format our value, bold if it is lower, and the paper's in brackets."""
    text = f"{ours:.1f}"
    if paper is None:
        return text
    return f"{f'**{text}**' if float(text) < float(f'{paper:.1f}') else text} ({paper:.1f})"


def draw_all() -> None:
    """Draw the times on both networks against the number of ranks."""
    results = recorded("scale")
    figure, both = subplots(2, size=(6.4, 6.6), sharex=True)
    for axes, key, network in zip(
        both, ("ethernet_s", "nodes_s"), results["networks"], strict=True
    ):
        for name, colour in DRAWN.items():
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
    save(figure, "scale")


if __name__ == "__main__":
    print("\n".join(tables()), rounds_of_oktopk(), sep="\n\n")
    draw_all()
