"""Tables and plots from the record of `signals.py`.

    python -m benchmarks.training.signals_report

prints the tables as Markdown and draws ``docs/figures/signals_TASK.svg`` and ``growth_TASK.svg``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean

from benchmarks.pages.tables import BESIDE, COLOURS, plain, save, subplots, table
from benchmarks.record import RESULTS, Row, rows_of
from sparcel.analysis import expected_nnz

SIMILARITIES = {
    "memories": "memory_cosine",
    "gradients": "gradient_cosine",
    "sums": "accumulated_cosine",
    "R² of memories": "memory_quantiles",
    "of gradients": "gradient_quantiles",
    "of own and true": "accumulated_quantiles",
    "Spearman": "spearman",
    "d/k": "hamming",
}


COUNTS = "task", "method", "sent", "from – to", "deviation", "result", "deviation", "ξ", "ξ of C.2"
CONTRACTIONS = (
    *("task", "method", "best γ", "γ, leader's k", "own γ, chunks", "γ, chunks"),
    *("cosine", "needed", "β from", "to"),
)


def counts_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of the counts of coordinates, over those asked for, and of both ξ."""
    return table(
        COUNTS,
        (
            (
                row["task"],
                row["method"],
                f"{mean(row['selected']):.2f}",
                f"{min(row['selected']):.2f} – {max(row['selected']):.2f}",
                f"{row['selected_deviation']:.1%}",
                f"{mean(row['result']):.2f}",
                f"{row['result_deviation']:.1%}",
                *_means(row, "xi", "xi_sum"),
            )
            for row in rows
        ),
    )


def similarity_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of ScaleCom's figures: means over the steps that were looked at."""
    return table(
        ("task", "method", *SIMILARITIES),
        ((row["task"], row["method"], *_means(row, *SIMILARITIES.values())) for row in rows),
    )


def contraction_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of Lemma 1 to 3: contractions, the cosine that is needed, β's interval."""
    keys = (
        *("contraction_best", "contraction_leader", "contraction_own", "contraction_true"),
        *("accumulated_cosine", "cosine_needed"),
    )
    return table(
        CONTRACTIONS,
        ((row["task"], row["method"], *_means(row, *keys), *_betas(row)) for row in rows),
    )


def _betas(row: Row) -> Sequence[str]:
    """Return the ends of Lemma 3's interval of β."""
    gamma = _mean(row, "contraction_true")
    root = math.sqrt(1 - gamma * gamma)
    return [f"{(1 + gamma + sign * root) / (2 * (1 + gamma)):.2f}" for sign in (-1, 1)]


def growth_table(row: Row) -> Iterator[str]:
    """Return the lines of the density of a sum, by step, density and number of ranks."""
    (first, *_) = row["growth"].values()
    powers = [2**p for p in range(len(next(iter(first.values()))))]
    lines = [
        (step, f"{float(density):.1%}", *(f"{value:.1%}" for value in values))
        for step, grown in row["growth"].items()
        for density, values in grown.items()
    ]
    for density in map(float, first):
        size, k = 10**6, round(1e6 * density)
        uniform = (f"{expected_nnz(size, k, ranks) / size:.1%}" for ranks in powers)
        lines.append(("at random", f"{density:.1%}", *uniform))
    return table(("step", "density", *map(str, powers)), lines)


def uniform_table(size: int = 512) -> Iterator[str]:
    """Return the lines of SparCML's Figure 7: the expected nnz of a sum of random selections."""
    worlds = [2**p for p in range(1, 8)]
    return table(
        (f"k of {size}", *(f"P = {ranks}" for ranks in worlds)),
        (
            (str(k), *(f"{expected_nnz(size, k, ranks):.0f}" for ranks in worlds))
            for k in (1, 4, 16, 64, 128)
        ),
    )


def draw(rows: Sequence[Row], task: str) -> None:
    """Draw ξ, the coordinates sent, and the similarity of memories over the steps."""
    figure, (xis, counts, cosines) = subplots(3, size=(6.4, 6.5), sharex=True)
    for row in rows:
        if row["task"] != task:
            continue
        looks = row["looks"]
        steps = [one["step"] for one in looks]
        (line,) = xis.plot(steps, [one["xi"] for one in looks], label=row["method"])
        sent = row["selected"]
        places = [row["steps"] * (part + 0.5) / len(sent) for part in range(len(sent))]
        counts.plot(places, sent, color=line.get_color())
        cosines.plot(steps, [one["memory_cosine"] for one in looks], color=line.get_color())
    xis.set(ylabel="ξ", title=task)
    counts.set(ylabel="sent / asked", yscale="log")
    plain(counts.yaxis)
    cosines.set(xlabel="step", ylabel="cosine of memories")
    figure.legend(loc="outside upper right", ncols=3)
    save(figure, f"signals_{task}")


def draw_growth(row: Row) -> None:
    """Draw the density of the sum of exact selections against the ranks, at the last step."""
    figure, axes = subplots()
    *_, step = row["growth"]
    for place, (density, shares) in enumerate(row["growth"][step].items()):
        ranks = [2**power for power in range(len(shares))]
        name, size, k = f"{100 * float(density):g} %", 10**6, round(1e6 * float(density))
        chance = [100 * expected_nnz(size, k, count) / size for count in ranks]
        line = {"color": COLOURS[place]}
        axes.plot(ranks, [100 * share for share in shares], "o-", label=name, **line)
        axes.plot(ranks, chance, ":", label=f"{name}, by chance", **line)
    axes.set(xscale="log", xlabel="ranks", ylabel="density of the sum, %", ylim=(0, 100))
    axes.set(title=f"{row['task']}, step {step}, each rank's largest")
    axes.set_xticks(ranks, ranks)
    axes.minorticks_off()
    axes.legend(**BESIDE)
    save(figure, f"growth_{row['task']}")


def _mean(row: Row, key: str) -> float:
    return mean(look[key] for look in row["looks"] if look[key] is not None)


def _means(row: Row, *keys: str) -> Iterator[str]:
    return (f"{_mean(row, key):.2f}" for key in keys)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of all tables, an empty one between two."""
    yield from (*counts_table(rows), "")
    yield from (*similarity_table(rows), "")
    yield from (*contraction_table(rows), "")
    for row in rows:
        if row["method"] == "topk":
            yield from (*growth_table(row), "")
    yield from uniform_table()


def draw_all() -> None:
    """Draw the figures."""
    rows = rows_of(RESULTS / "signals.json")
    for task in {row["task"] for row in rows}:
        draw(rows, task)
    for row in rows:
        if row["method"] == "topk":
            draw_growth(row)


def main() -> None:
    rows = rows_of(RESULTS / "signals.json")
    print("\n".join(tables(rows)))
    draw_all()


if __name__ == "__main__":
    main()
