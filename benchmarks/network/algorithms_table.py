"""Print the tables of docs/explanation/algorithms.md, and draw docs/figures/scale.svg.

They are of the record of `scale.py`: rounds and words, beside the papers' closed forms, and times.

python -m benchmarks.network.scale --output benchmarks/results/scale.json
python -m benchmarks.network.algorithms_table
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log2
from typing import Any

from benchmarks.pages.tables import COLOURS, DENSE, plain, save, subplots, table
from benchmarks.record import RESULTS

EXACT = "dense", "allgather", "recursive_doubling", "halving_doubling"
DRAWN = dict(
    zip((*EXACT, "gtopk", "oktopk", "hitopk", "scalecom"), (DENSE, *COLOURS), strict=False)
)
"""Colours of the algorithms in the figure: of those that add all, and of those that select."""


@dataclass(frozen=True)
class Paper:
    """A paper's closed form of an algorithm's cost, for P ranks and k of n coordinates.

    ``rounds`` and ``words`` are its latency and its bandwidth term, in words of 4 bytes. If the
    form is an interval, they are its end for indices that hardly overlap.
    """

    source: str
    rounds: Callable[[float], float]
    words: Callable[[float, float, float], float]


PAPERS = {
    "dense": Paper("Ok-Topk, table 1", lambda p: 2 * log2(p), lambda p, n, k: 2 * n * (p - 1) / p),
    "allgather": Paper("Ok-Topk, table 1", log2, lambda p, n, k: 2 * k * (p - 1)),
    "recursive_doubling": Paper("SparCML, section 5.3.1", log2, lambda p, n, k: 2 * k * (p - 1)),
    "split_allgather": Paper(
        "Ok-Topk, table 1", lambda p: p + 2 * log2(p), lambda p, n, k: (2 * k + n) * (p - 1) / p
    ),
    "gtopk": Paper("Ok-Topk, table 1", lambda p: 2 * log2(p), lambda p, n, k: 2 * k * log2(p)),
    "oktopk": Paper(
        "Ok-Topk, table 1", lambda p: 2 * p + 2 * log2(p), lambda p, n, k: 6 * k * (p - 1) / p
    ),
    "hitopk": Paper(
        "CommLib, equations 7, 9 and 10",
        lambda p: group(p) - 1 + log2(p / group(p)) + log2(group(p)),
        lambda p, n, k: (
            ((group(p) - 1) * n + (p / group(p) - 1) * k + (group(p) - 1) * p / group(p) * k)
            / group(p)
        ),
    ),
}


def group(p: float) -> float:
    """Return the number of ranks a node in `scale.py`."""
    return min(8, p // 2)


def recorded() -> dict[str, Any]:
    """Return the record of `scale.py`."""
    record: dict[str, Any] = json.loads((RESULTS / "scale.json").read_text())
    return record


def tables() -> Iterator[str]:
    """Yield the lines of all tables, an empty one after each."""
    results = recorded()
    size, count = results["size"], results["count"]
    found = {(row["algorithm"], row["ranks"]): row for row in results["rows"]}
    names, ranks = dict.fromkeys(name for name, _ in found), sorted({p for _, p in found})

    def rounds(name: str, p: int) -> str:
        return compared(found[name, p]["rounds"], name in PAPERS and PAPERS[name].rounds(p), 0)

    def words(name: str, p: int) -> str:
        paper = name in PAPERS and PAPERS[name].words(p, size, count) / count
        return compared(found[name, p]["bytes"] / 4 / count, paper, 1)

    for title, cell in (("Rounds", rounds), ("Words a rank, in multiples of k", words)):
        yield from (f"{title}:", "")
        rows = (
            (f"`{name}`", *(cell(name, p) if (name, p) in found else "" for p in ranks))
            for name in names
        )
        yield from table(("", *(f"P = {p}" for p in ranks)), rows)
        yield ""


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


def compared(ours: float, paper: float | bool, digits: int) -> str:
    """Format our value, bold if it is lower, and the paper's in brackets."""
    text, other = f"{ours:.{digits}f}", f"{paper:.{digits}f}"
    if paper is False:
        return text
    return f"{f'**{text}**' if float(text) < float(other) else text} ({other})"


def draw_all() -> None:
    """Draw the times on both networks against the number of ranks."""
    results = recorded()
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
    print("\n".join(tables()))
    draw_all()
