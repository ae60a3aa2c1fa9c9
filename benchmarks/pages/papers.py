"""The tables of docs/records/papers.md: figures of the papers beside ours, from the records.

python -m benchmarks.pages.papers
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from benchmarks.network import papers_models as models
from benchmarks.pages.tables import over_seeds, table
from benchmarks.record import RESULTS, Row, rows_of
from sparcel.analysis import expected_nnz


@dataclass(frozen=True)
class Figure:
    """A table or figure of a paper that is reproduced.

    Attributes
    ----------
    name, page
        What it is, and the page or the section that has more of it.
    theirs, ours
        What it shows.
    module
        Of benchmarks/, with its arguments, or a command.
    record
        Of ours; None where it is computed when the pages are checked.
    """

    name: str
    page: str
    theirs: str
    ours: str
    module: str
    record: str | None = None

    def cells(self) -> Iterator[str]:
        """Yield a line of a table."""
        yield f"[{self.name}]({self.page})"
        command = self.module if " bench " in self.module else f"python -m benchmarks.{self.module}"
        yield from (self.theirs, self.ours, f"`{command}`")
        path = f"../../benchmarks/results/{self.record}.json"
        yield f"[{self.record}]({path})" if self.record else "computed"


def sparcml() -> Iterator[Figure]:
    """Yield the figures of SparCML."""
    growth = _growth()
    fills = " and ".join(
        f"{_percent(min(ends), max(ends))} at {_percent(float(density))}"
        for density in ("0.01", "0.1")
        for ends in [[grown[density][-1] for grown in growth.values()]]
    )
    yield Figure(
        "Figure 1, density of sums",
        "#density-of-sums",
        "at 5 to 10 %, many ranks make a sum dense",
        f"64 ranks fill {fills}",
        "training.signals DATA --tasks images",
        "signals",
    )
    times = _bench()
    dense = times.pop(1.0)["dense fp32"]
    yield Figure(
        "Figure 3, times of sums",
        "../how-to/benchmark.md",
        "recursive doubling where data are few, split and gather where they are more",
        "; ".join(
            f"{100 * density:.2g} %: {best}, {dense / own[best]:.0f}× dense"
            for density, own in times.items()
            for best in [min(SUMS, key=lambda name: own[name])]
        ),
        "sparcel bench --sizes 16777216 --densities 0.0078125,0.001,0.00000596",
        "bench_8_nodes_1gbit",
    )
    linear: Any = importlib.import_module("benchmarks.linear.report")
    rates = {
        (row["set"], row["algorithm"]): median(row["networks"]["Gigabit Ethernet"]["seconds"])
        for row in _rows("linear_rates")
        if row["ranks"] == 8
    }
    ours = " and ".join(
        f"{rates[name, 'dense'] / rates[name, 'split_allgather']:.1f}×"
        for name in ("urls", "posts-reviews")
    )
    theirs = " and ".join(
        f"{linear.PAPER_RATES[name, 8, 'Gigabit Ethernet'][0]:.1f}×"
        for name in ("urls", "posts-reviews")
    )
    yield Figure(
        "Table 2, linear models on Gigabit Ethernet",
        "linear.md#other-networks-simulated",
        f"URL {theirs.replace('and', 'and Webspam')} as fast as dense",
        f"{ours}, on sets that stand in",
        "linear.rates",
        "linear_rates",
    )
    gathers: dict[str, list[float]] = {}
    for row in _rows("linear_scd"):
        if row["nodes"] == 8:
            gathers.setdefault(row["gather"], []).append(row["seconds"])
    yield Figure(
        "Section 8.2, coordinate descent",
        "linear.md#coordinate-descent",
        "a sparse gather 1.8× as fast as a dense one",
        f"{median(gathers['dense']) / median(gathers['sparse']):.1f}×",
        "linear.scd",
        "linear_scd",
    )
    epochs = {
        row["solver"]: row["iteration_seconds"] * row["iterations_an_epoch"]
        for row in _rows("linear_spark")
        if row["nodes"] == 8
    }
    yield Figure(
        "Section 8.2, Spark on Gigabit Ethernet",
        "linear.md#spark",
        "86× as fast as Spark 1.6",
        f"{epochs['Spark MLlib, mini-batch SGD'] / epochs['sparcel, SGD']:.0f}× as Spark 4.3",
        "linear.spark",
        "linear_spark",
    )
    yield Figure(
        "Figure 4a, CIFAR-10",
        "training.md#one-per-cent",
        "16 or 8 of each 512, in 4 bits: level with dense, and 1 % above",
        f"points: by buckets {_beside_dense('sparcml bucketed')},"
        f" in 4 bits {_beside_dense('sparcml 4 bits')}",
        "training.convergence DATA",
        "convergence",
    )
    size, k, ranks = 512, 4, 128
    union = sum((-1) ** (i - 1) * math.comb(ranks, i) * (k / size) ** i for i in range(1, 129))
    yield Figure(
        "Figure 7, expected size of a sum",
        "../how-to/analysis.md#fill-in",
        f"k = {k}, N = {size}, P = {ranks}: {size * union:.0f}",
        f"{expected_nnz(size, k, ranks):.0f}",
        "pages.papers",
    )


def gtopk() -> Iterator[Figure]:
    """Yield the figures of gTop-k."""
    rows = {ranks: (theirs, ours) for ranks, theirs, ours in models.sums()}
    yield Figure(
        "Table I and Figure 9, time of a sum",
        "#gtop-ks-model-of-time",
        *(
            f"P = 32: top-k {1e3 * pair[0]:.1f} ms, gTop-k {1e3 * pair[1]:.1f} ms"
            for pair in rows[32]
        ),
        "network.papers_models",
    )
    gains = [(theirs, ours) for *_, theirs, ours in models.throughputs()]
    yield Figure(
        "Table IV, throughput on 32 nodes",
        "#gtop-ks-model-of-time",
        *(f"{min(own):.1f} to {max(own):.1f}× dense" for own in zip(*gains, strict=True)),
        "network.papers_models",
    )
    yield Figure(
        "Figures 5 and 12, CIFAR-10",
        "training.md#one-per-cent",
        "0.1 % on 4 workers: level with dense",
        f"points on 8: {_beside_dense('gtopk')} at 1 %,"
        f" {_beside_dense('gtopk', 'convergence_sweeps', density=0.001)} at 0.1 %",
        "training.convergence DATA",
        "convergence_sweeps",
    )
    many = {"ranks": 32, "batch": 256, "name": "convergence_sweeps"}
    yield Figure(
        "Figure 13, 32 workers, a large batch",
        "training.md#other-settings",
        "gTop-k 1 and 9 % below top-k",
        f"points over dense: gTop-k {_beside_dense('gtopk', **many)},"
        f" top-k {_beside_dense('topk', **many)}",
        "training.convergence DATA --ranks 32 --batch 256",
        "convergence_sweeps",
    )


def scalecom() -> Iterator[Figure]:
    """Yield the figures of ScaleCom."""
    found = {what: ours for what, _, ours, _ in models.claims()}
    times = [found[f"{method}, {ranks} workers"] for method, ranks in PLANNED]
    yield Figure(
        "Figures A8 and A9, around a parameter server",
        "#scalecoms-appendix-f",
        "ScaleCom 2 and 2×, local top-k 1.92 and 1.2× on 8 and 128 workers",
        "{:.2f} and {:.2f}×, {:.2f} and {:.2f}×".format(*times),
        "network.papers_models",
    )
    leader = _looks("scalecom")
    yield Figure(
        "Figure A1, likeness of two workers",
        "#likeness-of-ranks",
        "R² of memories 0.99, of gradients 0.89; Spearman with the sum 0.657",
        f"{leader['memory_quantiles']:.2f}, {leader['gradient_quantiles']:.2f};"
        f" {leader['spearman']:.2f}",
        "training.signals DATA --tasks images",
        "signals",
    )
    yield Figure(
        "Lemma 3, β",
        "#likeness-of-ranks",
        "β = 0.1 in the trainings of large batches",
        "the lemma asks for β from {} to {}".format(*_betas(leader)),
        "training.signals DATA --tasks images",
        "signals",
    )
    small = "convergence", "scalecom"
    yield Figure(
        "Figure A3a, CIFAR-10",
        "training.md#one-per-cent",
        "+0.20 points with 92× compression, 160 epochs",
        f"{_beside_dense(small[1])} points at 1 %",
        "training.convergence DATA",
        small[0],
    )
    yield Figure(
        "Figure A4b, a large batch on ImageNet",
        "#the-papers-own-recipes",
        "-2.16 points without the filter, -0.41 with β = 0.1",
        f"{_recipe('scalecom without its filter')} without, {_recipe('scalecom')} with it",
        'training.papers_recipes DATA --recipes scalecom "scalecom without its filter"',
        "papers_recipes",
    )


def oktopk() -> Iterator[Figure]:
    """Yield the figures of Ok-Topk."""
    scale = json.loads((RESULTS / "scale.json").read_text())
    words = {
        row["ranks"]: row["bytes"] / 4 / scale["count"]
        for row in scale["rows"]
        if row["algorithm"] == "oktopk"
    }
    ranks = [one for one in sorted(words) if one <= 256]
    yield Figure(
        "Table 1, words of a sum",
        "../explanation/algorithms.md#side-by-side",
        "from 2k(P − 1)/P to 6k(P − 1)/P",
        "; ".join(f"P = {one}: {words[one]:.1f}k" for one in ranks),
        "network.scale",
        "scale",
    )
    rows = {row["method"]: row for row in _signals()}
    reused, gauss = (rows[name] for name in ("oktopk reuse", "gaussiank, as estimated"))
    yield Figure(
        "Figures 4 and 6, reused thresholds",
        "#selected-and-asked-for",
        "off by less than 11 %; Gaussian-k an order of magnitude below k",
        f"off by {_percent(reused['selected_deviation'])};"
        f" Gaussian-k from {min(gauss['selected']):.2f} to {max(gauss['selected']):.2f} k",
        "training.signals DATA --tasks images",
        "signals",
    )
    own = [_looks(method)["xi"] for method in ("oktopk", "oktopk reuse")]
    most = max(look["xi"] for name in ("oktopk", "oktopk reuse") for look in rows[name]["looks"])
    yield Figure(
        "Figure 5, ξ",
        "#selected-and-asked-for",
        "below P",
        f"{own[0]:.1f} in the mean, reused {own[1]:.1f}; at most {most:.1f} of"
        f" {rows['oktopk']['ranks']}",
        "training.signals DATA --tasks images",
        "signals",
    )
    yield Figure(
        "Section 5.2, density of the sum",
        "#selected-and-asked-for",
        "13.2 % on 16 ranks at 1 %",
        f"{mean(rows['topk']['result']):.1f} % on 8 at 1 %",
        "training.signals DATA --tasks images",
        "signals",
    )
    reduce, gather = _balanced()
    yield Figure(
        "Figure 7, balancing",
        "#ok-topks-balancing",
        "reduce 1.13 to 1.75×, gather 1.12 to 1.43×, more on more ranks",
        f"reduce {min(reduce):.1f} to {max(reduce):.1f}×,"
        f" gather {min(gather):.2f} to {max(gather):.2f}× on 8 to 32",
        "network.balancing",
        "balancing",
    )
    yield Figure(
        "Figure 9, CIFAR-10",
        "#the-papers-own-recipes",
        "very close to dense, 160 epochs",
        f"{_recipe('oktopk')} points",
        "training.papers_recipes DATA --recipes oktopk",
        "papers_recipes",
    )


def commlib() -> Iterator[Figure]:
    """Yield the figures of CommLib (MSTopK)."""
    report: Any = importlib.import_module("benchmarks.network.commlib_report")
    rows = report.recorded()
    existing = report.of_kind(rows, "existing").values()
    parts = [report.step_parts(report.warm(row, 12)) for row in existing]
    reading = " and ".join(
        f"{row['label']} {_percent(1 - one['computing'] / sum(one.values()))}"
        for row, one in zip(existing, parts, strict=True)
    )
    yield Figure(
        "Figure 1, where time goes",
        "commlib.md#where-the-time-goes",
        "reading and communicating take a large part of a step",
        f"not computing, 12 pixels: {reading}",
        "network.commlib IMAGES",
        "commlib",
    )
    (normal,) = (row for row in _rows("selectors") if row["distribution"] == "normal")
    mine, exact = (
        next(one for one in normal["selectors"] if one["selector"].startswith(name))
        for name in ("MSTopK", "ExactTopK")
    )
    yield Figure(
        "Figure 6, MSTopK at 0.1 %",
        "../explanation/algorithms.md#selectors",
        "far faster than an exact top-k on a GPU, more than 99 % the same",
        f"{mine['select_ms'] / exact['select_ms']:.1f}× the time of our exact one on a core,"
        f" {_percent(mine['overlap'])} the same",
        "streams.selection --selectors",
        "selectors",
    )
    tiers: dict[str, list[float]] = {}
    for row in _rows("two_tiers"):
        tiers.setdefault(row["method"], []).append(row["ms"])
    best = tiers.pop("HiTopKComm")
    times = {
        name: [one / least for one, least in zip(own, best, strict=True)]
        for name, own in tiers.items()
    }
    yield Figure(
        "Figure 7, time of an aggregation",
        "two-tiers.md#figure-7-time-of-an-aggregation",
        "HiTopKComm, then 2DTAR, TreeAR, NaiveAG",
        "of its time: "
        + ", ".join(f"{name} {min(own):.1f} to {max(own):.1f}×" for name, own in times.items()),
        "network.two_tiers",
        "two_tiers",
    )
    shares = [row["parts_ms"][0] / sum(row["parts_ms"]) for row in _rows("two_tiers_steps")]
    yield Figure(
        "Figure 8, HiTopKComm's steps",
        "two-tiers.md#figure-8-hitopkcomms-four-steps",
        "most in the gather between nodes",
        f"{_percent(min(shares), max(shares))} in the reduce-scatter inside",
        "network.two_tiers --breakdown",
        "two_tiers_steps",
    )
    caches = [
        min(row["plain_s"]) / min(row["cached_s"][1:])
        for work in ("reading", "training")
        for row in _rows("data_cache")
        if row["loader"] == "2 forked, persistent" and row["work"] == work
    ]
    half = len(caches) // 2
    yield Figure(
        "Figure 9, DataCache",
        "../how-to/data.md#what-the-cache-gains",
        "reading over 10× as fast, training about 2×",
        f"{min(caches[:half]):.0f} to {max(caches[:half]):.0f}×,"
        f" {min(caches[half:]):.1f} to {max(caches[half:]):.1f}×",
        "data.cache DATA",
        "data_cache",
    )
    norms = {row["model"]: row for row in _rows("norms_lab")}
    yield Figure(
        "Section 5.4, norms of LARS in parallel",
        "../how-to/optimizers.md#what-it-costs-and-when-it-pays",
        "ResNet-50 11 to 7 ms, Transformer 30 to 14 ms",
        ", ".join(
            f"{name} {norms[name]['everyone_ms']:.0f} to {norms[name]['parallel_ms']:.0f} ms"
            for name in ("ResNet-50", "transformer")
        ),
        "training.norms ranks",
        "norms_lab",
    )
    large = [row for row in rows if row["kind"] == "convergence"]
    ends = {
        name: mean(100 * report.last(row) for row in large if row["label"] == name)
        for name in report.PAPER_TABLE_2
    }
    yield Figure(
        "Table 2 and Figure 10, a large batch",
        "commlib.md#dense-top-k-and-mstopk-at-a-large-batch",
        *(
            "points: "
            + ", ".join(
                f"{name} {own[name] - own['2DTAR-SGD']:+.2f}" for name in own if "2D" not in name
            )
            for own in (report.PAPER_TABLE_2, ends)
        ),
        "network.commlib IMAGES --rate 10gbit",
        "commlib",
    )
    found = report.of_kind(rows, "throughput")
    alone = report.rate(report.warm(found["alone"], 12))
    yield Figure(
        "Table 3, scaling efficiency",
        "commlib.md#throughput-and-scaling-efficiency",
        *(
            "small images: "
            + ", ".join(f"{name} {share}" for name, share in zip(report.SYSTEMS, own, strict=True))
            for own in (
                [f"{share} %" for share in report.PAPER_TABLE_3[12]],
                [
                    _percent(report.rate(report.warm(found[name], 12)) / alone)
                    for name in report.SYSTEMS
                ],
            )
        ),
        "network.commlib IMAGES",
        "commlib",
    )
    trained = report.of_kind(rows, "training")
    ddp, whole = (report.seconds_to(trained[name], 0.6) for name in ("DDP", "all three"))
    yield Figure(
        "Table 5, time to an accuracy",
        "commlib.md#time-to-an-accuracy",
        "151 s, where the best before took 158 s",
        f"{whole:.0f} s, where DDP takes {ddp:.0f} s",
        "network.commlib IMAGES",
        "commlib",
    )


PAPERS = {
    "SparCML": sparcml,
    "gTop-k": gtopk,
    "ScaleCom": scalecom,
    "Ok-Topk": oktopk,
    "CommLib": commlib,
}

PLANNED = (("ScaleCom", 8), ("ScaleCom", 128), ("local top-k", 8), ("local top-k", 128))
SUMS = ("recursive_doubling", "halving_doubling", "split_allgather", "ring")


def figures_table(paper: str) -> Iterator[str]:
    """Yield the lines of a paper's table."""
    columns = (f"of {paper}", "theirs", "ours", "made by", "record")
    return table(columns, (one.cells() for one in PAPERS[paper]()))


def _percent(*shares: float) -> str:
    """Return a share or two in per cent."""
    return f"{' to '.join(f'{100 * share:.0f}' for share in shares)} %"


def _rows(name: str) -> list[Row]:
    return rows_of(RESULTS / f"{name}.json")


def _bench() -> dict[float, dict[str, float]]:
    """Return median seconds over Gloo, by density and algorithm."""
    record = json.loads((RESULTS / "bench_8_nodes_1gbit.json").read_text())
    found: dict[float, dict[str, float]] = {}
    for cell in record["cells"]:
        if cell["engine"] == "gloo":
            own = found.setdefault(cell["density"], {})
            own[cell["algorithm"]] = cell["seconds"]["median"]
    return dict(sorted(found.items()))


def _beside_dense(method: str, name: str = "convergence", **setting: Any) -> str:
    """Return the points of accuracy on `images` over dense training with the same seeds."""
    setting = {"ranks": 8, "batch": 64} | setting
    place = {key: value for key, value in setting.items() if key != "density"}
    every = [*_rows("convergence"), *_rows("convergence_sweeps")]
    dense = {
        row["seed"]: row["accuracy"]
        for row in every
        if row["task"] == "images" and row["method"] == "dense" and place.items() <= row.items()
    }
    wanted = {"task": "images", "method": method, **setting}
    runs = [row for row in _rows(name) if wanted.items() <= row.items()]
    return over_seeds([100 * (row["accuracy"] - dense[row["seed"]]) for row in runs], 1)


def _recipe(recipe: str) -> str:
    """Return the points of accuracy of a paper's recipe over dense training, same seeds."""
    rows = _rows("papers_recipes")
    key = ("batch", "steps", "seed")
    dense = {tuple(row[one] for one in key): row for row in rows if row["method"] == "dense"}
    runs = [row for row in rows if row["recipe"] == recipe and row["method"] != "dense"]
    over = [100 * (run["accuracy"] - dense[*(run[one] for one in key)]["accuracy"]) for run in runs]
    return over_seeds(over, 1)


def _signals() -> list[Row]:
    return [row for row in _rows("signals") if row["task"] == "images"]


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
    rows = {(row["ranks"], row["regions"], row["blocks"]): row for row in _rows("balancing")}
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

    rows = _rows("balancing")
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
    """Yield the lines of all tables, an empty one between two."""
    for paper in PAPERS:
        yield from (*figures_table(paper), "")
    for lines in (models.claims_table, models.throughput_table, models.sums_table):
        yield from (*lines(), "")
    for lines in (balancing_table, growth_table, counts_table, likeness_table):
        yield from (*lines(), "")


if __name__ == "__main__":
    print("\n".join(all_tables()))
