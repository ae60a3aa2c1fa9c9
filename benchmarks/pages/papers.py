"""What docs/records/papers.md shows as ours, from the records: a cell of each row, and tables.

    python -m benchmarks.pages.papers

prints all of it. What the papers show, and how ours is made, stands on the page alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks.network import commlib_report as report
from benchmarks.network import papers_models as models
from benchmarks.pages.tables import over_seeds, points, table
from benchmarks.record import Row, grouped, recorded, shown_of
from sparcel.tools.analysis import expected_nnz


class Ours(NamedTuple):
    """What sparcel shows of a paper's table or figure.

    Attributes
    ----------
    figure
        Its name, as the row on the page begins.
    shown
        The cell.
    record
        Where it comes from; ``"computed"`` where the check itself computes it.
    """

    figure: str
    shown: str
    record: str


def sparcml() -> Iterator[Ours]:
    """Yield what is ours of SparCML."""
    growth = _growth()
    fills = " and ".join(
        f"{_percent(min(ends), max(ends))} at {_percent(float(density))}"
        for density in ("0.01", "0.1")
        for ends in [[grown[density][-1] for grown in growth.values()]]
    )
    yield Ours("Figure 1", f"64 ranks fill {fills}", "signals")
    times = _bench()
    dense = times.pop(1.0)["dense fp32"]
    best = {density: min(SUMS, key=own.__getitem__) for density, own in times.items()}
    fastest = "; ".join(
        f"{100 * density:.2g} %: {name}, {dense / times[density][name]:.0f}× dense"
        for density, name in best.items()
    )
    yield Ours("Figure 3", fastest, "bench_8_nodes_1gbit")
    rates = {
        (row["set"], row["algorithm"]): median(row["networks"]["Gigabit Ethernet"]["seconds"])
        for row in shown_of("linear_rates")
        if row["ranks"] == 8
    }
    faster = " and ".join(
        f"{rates[name, 'dense'] / rates[name, 'split_allgather']:.1f}×"
        for name in ("urls", "posts-reviews")
    )
    yield Ours("Table 2", f"{faster}, on sets that stand in", "linear_rates")
    gathers = grouped((row for row in shown_of("linear_scd") if row["nodes"] == 8), "gather")
    dense_s, sparse_s = (
        median(row["seconds"] for row in gathers[one]) for one in ("dense", "sparse")
    )
    ratio = dense_s / sparse_s
    yield Ours("Section 8.2, coordinate descent", f"{ratio:.1f}×", "linear_scd")
    epochs = {
        row["solver"]: row["iteration_seconds"] * row["iterations_an_epoch"]
        for row in shown_of("linear_spark")
        if row["nodes"] == 8
    }
    ratio = epochs["Spark MLlib, mini-batch SGD"] / epochs["sparcel, SGD"]
    yield Ours("Section 8.2, Spark", f"{ratio:.0f}× as Spark 4.3", "linear_spark")
    points = f"points: {_over_dense('sparcml bucketed')} in float32; not trained in 4 bits since"
    yield Ours("Figure 4a", f"{points} their rounding changed", "convergence")
    yield Ours("Figure 7", f"{expected_nnz(512, 4, 128):.0f}", "computed")


def gtopk() -> Iterator[Ours]:
    """Yield what is ours of gTop-k."""
    times = {ranks: ours for ranks, _, ours in models.sums()}
    topk, tree = (f"{1e3 * seconds:.1f} ms" for seconds in times[32])
    yield Ours("Table I and Figure 9", f"P = 32: top-k {topk}, gTop-k {tree}", "computed")
    gains = [ours for *_, ours in models.throughputs()]
    yield Ours("Table IV", f"{min(gains):.1f} to {max(gains):.1f}× dense", "computed")
    sweeps = "convergence_sweeps"
    less = _over_dense("gtopk", sweeps, density=0.001)
    points = f"{_over_dense('gtopk')} at 1 %, {less} at 0.1 %"
    yield Ours("Figures 5 and 12", f"points on 8: {points}", sweeps)
    tree, topk = (_over_dense(one, sweeps, ranks=32, batch=256) for one in ("gtopk", "topk"))
    yield Ours("Figure 13", f"points over dense: gTop-k {tree}, top-k {topk}", sweeps)


def scalecom() -> Iterator[Ours]:
    """Yield what is ours of ScaleCom."""
    found = {what: ours for what, _, ours, _ in models.claims()}
    pairs = (
        " and ".join(f"{found[f'{method}, {ranks} workers']:.2f}" for ranks in (8, 128))
        for method in ("ScaleCom", "local top-k")
    )
    yield Ours("Figures A8 and A9", ", ".join(f"{pair}×" for pair in pairs), "computed")
    looks = _looks("scalecom")
    quantiles = f"{looks['memory_quantiles']:.2f}, {looks['gradient_quantiles']:.2f}"
    yield Ours("Figure A1", f"{quantiles}; {looks['spearman']:.2f}", "signals")
    low, high = _betas(looks)
    yield Ours("Lemma 3", f"the lemma asks for β from {low} to {high}", "signals")
    yield Ours("Figure A3a", f"{_over_dense('scalecom')} points at 1 %", "convergence")
    without, filtered = map(_recipe, ("scalecom without its filter", "scalecom"))
    yield Ours("Figure A4b", f"{without} without, {filtered} with it", "papers_recipes")


def oktopk() -> Iterator[Ours]:
    """Yield what is ours of Ok-Topk."""
    scale = recorded("scale")
    words = "; ".join(
        f"P = {row['ranks']}: {row['bytes'] / 4 / scale['count']:.1f}k"
        for row in scale["rows"]
        if row["algorithm"] == "oktopk" and row["ranks"] <= 256
    )
    yield Ours("Table 1", words, "scale")
    rows = {row["method"]: row for row in _signals()}
    reused, gauss = rows["oktopk reuse"], rows["gaussiank, as estimated"]["selected"]
    off = f"off by {_percent(reused['selected_deviation'])}"
    least = f"Gaussian-k from {min(gauss):.2f} to {max(gauss):.2f} k"
    yield Ours("Figures 4 and 6", f"{off}; {least}", "signals")
    exact, again = (_looks(name)["xi"] for name in ("oktopk", "oktopk reuse"))
    most = max(look["xi"] for name in ("oktopk", "oktopk reuse") for look in rows[name]["looks"])
    means = f"{exact:.1f} in the mean, reused {again:.1f}"
    yield Ours("Figure 5", f"{means}; at most {most:.1f} of {reused['ranks']}", "signals")
    density = mean(rows["topk"]["result"])
    yield Ours("Section 5.2", f"{density:.1f} % on {reused['ranks']} at 1 %", "signals")
    reduce, gather = _balanced()
    worth = f"reduce {min(reduce):.1f} to {max(reduce):.1f}×, gather {min(gather):.2f} to"
    yield Ours("Figure 7", f"{worth} {max(gather):.2f}× on 8 to 32", "balancing")
    yield Ours("Figure 9", f"{_recipe('oktopk')} points", "papers_recipes")


def commlib() -> Iterator[Ours]:
    """Yield what is ours of CommLib."""
    rows = report.recorded()
    waits = " and ".join(
        f"{name} {_percent(1 - parts['computing'] / sum(parts.values()))}"
        for name, row in report.of_kind(rows, "existing").items()
        for parts in [report.step_parts(report.warm(row, 12))]
    )
    yield Ours("Figure 1", f"not computing, 12 pixels: {waits}", "commlib")
    normal = next(row for row in shown_of("selectors") if row["distribution"] == "normal")
    mine, exact = (
        next(one for one in normal["selectors"] if one["selector"].startswith(name))
        for name in ("MSTopK", "ExactTopK")
    )
    times = f"{mine['select_ms'] / exact['select_ms']:.1f}× the time of our exact one on a core"
    yield Ours("Figure 6", f"{times}, {_percent(mine['overlap'])} the same", "selectors")
    tiers = {
        method: [row["ms"] for row in own]
        for method, own in grouped(shown_of("two_tiers"), "method").items()
    }
    best = tiers.pop("HiTopKComm")
    slower = ", ".join(
        f"{name} {min(ratios):.1f} to {max(ratios):.1f}×"
        for name, own in tiers.items()
        for ratios in [[one / least for one, least in zip(own, best, strict=True)]]
    )
    yield Ours("Figure 7", f"of its time: {slower}", "two_tiers")
    shares = [row["parts_ms"][0] / sum(row["parts_ms"]) for row in shown_of("two_tiers_steps")]
    inside = _percent(min(shares), max(shares))
    yield Ours("Figure 8", f"{inside} in the reduce-scatter inside", "two_tiers_steps")
    cached = (row for row in shown_of("data_cache") if row["loader"] == "2 forked, persistent")
    by_work = grouped(cached, "work")
    read, trained = (
        [min(row["plain_s"]) / min(row["cached_s"][1:]) for row in by_work[work]]
        for work in ("reading", "training")
    )
    reads = f"{min(read):.0f} to {max(read):.0f}×"
    yield Ours("Figure 9", f"{reads}, {min(trained):.1f} to {max(trained):.1f}×", "data_cache")
    norms = {row["model"]: row for row in shown_of("norms_lab")}
    shared = ", ".join(
        f"{name} {norms[name]['everyone_ms']:.0f} to {norms[name]['parallel_ms']:.0f} ms"
        for name in ("ResNet-50", "transformer")
    )
    yield Ours("Section 5.4", shared, "norms_lab")
    ends = {
        name: mean(
            100 * report.last(row)
            for row in rows
            if (row["kind"], row["label"]) == ("convergence", name)
        )
        for name in report.PAPER_TABLE_2
    }
    points = ", ".join(
        f"{name} {ends[name] - ends['2DTAR-SGD']:+.2f}" for name in ("TopK-SGD", "MSTopK-SGD")
    )
    yield Ours("Table 2 and Figure 10", f"points: {points}", "commlib")
    found = report.of_kind(rows, "throughput")
    speed = {name: report.rate(report.warm(row, 12)) for name, row in found.items()}
    shares = (f"{name} {_percent(speed[name] / speed['alone'])}" for name in report.SYSTEMS)
    yield Ours("Table 3", f"small images: {', '.join(shares)}", "commlib")
    runs = report.of_kind(rows, "training")
    ddp, whole = (report.seconds_to(runs[name], 0.6) for name in ("DDP", "all three"))
    yield Ours("Table 5", f"{whole:.0f} s, where DDP takes {ddp:.0f} s", "commlib")


PAPERS = {
    "SparCML": sparcml,
    "gTop-k": gtopk,
    "ScaleCom": scalecom,
    "Ok-Topk": oktopk,
    "CommLib": commlib,
}
"""By the headings of the page."""

SUMS = ("recursive_doubling", "halving_doubling", "split_allgather", "ring")


def _percent(*shares: float) -> str:
    """Return a share or two in per cent."""
    return f"{' to '.join(f'{100 * share:.0f}' for share in shares)} %"


def _bench() -> dict[float, dict[str, float]]:
    """Return median seconds over Gloo, by density and algorithm."""
    cells = (cell for cell in recorded("bench_8_nodes_1gbit")["cells"] if cell["engine"] == "gloo")
    return {
        density: {cell["algorithm"]: cell["seconds"]["median"] for cell in own}
        for density, own in sorted(grouped(cells, "density").items())
    }


def _over_dense(method: str, name: str = "convergence", **setting: Any) -> str:
    """Return the points of accuracy on `images` over dense training with the same seeds."""
    setting = {"ranks": 8, "batch": 64} | setting
    place = {key: value for key, value in setting.items() if key != "density"}
    every = [*shown_of("convergence"), *shown_of("convergence_sweeps")]
    dense = {
        row["seed"]: row
        for row in every
        if row["task"] == "images" and row["method"] == "dense" and place.items() <= row.items()
    }
    wanted = {"task": "images", "method": method, **setting}
    runs = [row for row in shown_of(name) if wanted.items() <= row.items()]
    return over_seeds(points((row, dense[row["seed"]]) for row in runs), 1)


def _recipe(recipe: str) -> str:
    """Return the points of accuracy of a paper's recipe over dense training, same seeds."""
    rows = shown_of("papers_recipes")
    key = ("batch", "steps", "seed")
    dense = {tuple(row[one] for one in key): row for row in rows if row["method"] == "dense"}
    runs = [row for row in rows if row["recipe"] == recipe and row["method"] != "dense"]
    return over_seeds(points((run, dense[*(run[one] for one in key)]) for run in runs), 1)


def _signals() -> list[Row]:
    return [row for row in shown_of("signals") if row["task"] == "images"]


def _growth() -> dict[str, dict[str, list[float]]]:
    """Return the density of sums over 1, 2, 4 … ranks, by step and density."""
    (row,) = (row for row in _signals() if row["method"] == "topk")
    grown: dict[str, dict[str, list[float]]] = row["growth"]
    return grown


def _looks(method: str) -> dict[str, float]:
    """Return the means over the steps of what was looked at."""
    (row,) = (row for row in _signals() if row["method"] == method)
    return {
        key: mean(look[key] for look in row["looks"] if look[key] is not None)
        for key in row["looks"][0]
    }


def _betas(looks: dict[str, float]) -> Sequence[str]:
    """Return the ends of Lemma 3's interval of β."""
    gamma = looks["contraction_true"]
    root = math.sqrt(1 - gamma * gamma)
    return [f"{(1 + gamma + sign * root) / (2 * (1 + gamma)):.2f}" for sign in (-1, 1)]


def _balanced() -> tuple[Sequence[float], Sequence[float]]:
    """Return how many times as fast balanced regions reduce, and evened blocks are gathered."""
    rows = {(row["ranks"], row["regions"], row["blocks"]): row for row in shown_of("balancing")}
    ranks = sorted({one for one, *_ in rows})
    reduce, gather = (
        [rows[one, *slow][what] / rows[one, *fast][what] for one in ranks]
        for what, slow, fast in (
            ("reduce_ms", ("equal", "direct"), ("averaged", "direct")),
            ("gather_ms", ("averaged", "direct"), ("averaged", "evened")),
        )
    )
    return reduce, gather


def balancing_table() -> Iterator[str]:
    """Yield the lines of Ok-Topk's Figure 7: milliseconds and kilobytes of each phase."""

    def shown(row: Row, phase: str) -> str:
        return f"{row[f'{phase}_ms']:.1f} ms, {row[f'{phase}_bytes'] / 1e3:.0f} kB"

    rows = shown_of("balancing")
    pairs = zip(rows[::2], rows[1::2], strict=True)  # direct, evened
    return table(
        ("P", "regions", "reduce", "gather, direct", "gather, evened"),
        (
            (
                *(str(direct["ranks"]), direct["regions"], shown(direct, "reduce")),
                *(shown(row, "gather") for row in (direct, evened)),
            )
            for direct, evened in pairs
        ),
    )


def growth_table() -> Iterator[str]:
    """Yield the lines of SparCML's Figure 1: the density of a sum by step, density and ranks."""
    grown = _growth()
    (first, *_) = grown.values()
    powers = [2**power for power in range(len(next(iter(first.values()))))]
    lines = [
        (f"step {step}", f"{float(density):.1%}", *(f"{value:.1%}" for value in values))
        for step, own in grown.items()
        for density, values in own.items()
    ]
    for density in map(float, first):
        size, k = 10**6, round(1e6 * density)
        chance = (f"{expected_nnz(size, k, ranks) / size:.1%}" for ranks in powers)
        lines.append(("by chance", f"{density:.1%}", *chance))
    return table(("", "a rank", *map(str, powers)), lines)


def counts_table() -> Iterator[str]:
    """Yield the lines of the counts of coordinates, over those asked for, and of ξ."""
    columns = ("method", "sent", "from", "to", "off by", "result", "ξ")
    return table(
        columns,
        (
            (
                f"`{row['method']}`",
                *(f"{one(row['selected']):.2f}" for one in (mean, min, max)),
                f"{row['selected_deviation']:.0%}",
                f"{mean(row['result']):.2f}",
                f"{_looks(row['method'])['xi']:.2f}",
            )
            for row in _signals()
        ),
    )


LIKENESS = {
    "cosine of memories": "memory_cosine",
    "of sums": "accumulated_cosine",
    "needed": "cosine_needed",
    "R²": "memory_quantiles",
    "Spearman": "spearman",
    "d/k": "hamming",
    "γ, true": "contraction_best",
    "γ, leader's": "contraction_leader",
}


def likeness_table() -> Iterator[str]:
    """Yield the lines of ScaleCom's similarities and contractions, and of Lemma 3's β."""
    return table(
        ("method", *LIKENESS, "β from", "to"),
        (
            (
                f"`{row['method']}`",
                *(f"{looks[key]:.2f}" for key in LIKENESS.values()),
                *_betas(looks),
            )
            for row in _signals()
            for looks in [_looks(row["method"])]
        ),
    )


def all_tables() -> Iterator[str]:
    """Yield the lines of all tables that are ours."""
    computed = models.claims_table, models.throughput_table, models.sums_table
    for lines in (*computed, balancing_table, growth_table, counts_table, likeness_table):
        yield from lines()


def main() -> None:
    """Print all that is ours."""
    for paper, ours in PAPERS.items():
        print(*table((f"of {paper}", "ours", "record"), ours()), "", sep="\n")
    print(*all_tables(), sep="\n")


if __name__ == "__main__":
    main()
