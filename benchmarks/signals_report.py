"""Tables and plots of docs/experiments.md from the record of `signals.py`.

    python benchmarks/signals_report.py

prints the tables as Markdown and draws ``docs/figures/signals_TASK.svg``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean

from convergence_report import FIGURES
from record import RESULTS, Row, rows_of

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


def counts_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the counts of coordinates, over those asked for, and of both ξ."""
    yield "| task | method | sent | from – to | deviation | result | deviation | ξ | ξ of C.2 |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        sent = row["selected"]
        cells = (
            row["task"],
            row["method"],
            f"{mean(sent):.2f}",
            f"{min(sent):.2f} – {max(sent):.2f}",
            f"{row['selected_deviation']:.1%}",
            f"{mean(row['result']):.2f}",
            f"{row['result_deviation']:.1%}",
            _over(row, "xi"),
            _over(row, "xi_sum"),
        )
        yield f"| {' | '.join(cells)} |"


def similarity_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of ScaleCom's figures: means over the steps that were looked at."""
    yield f"| task | method | {' | '.join(SIMILARITIES)} |"
    yield "|---" * (2 + len(SIMILARITIES)) + "|"
    for row in rows:
        cells = (row["task"], row["method"], *(_over(row, key) for key in SIMILARITIES.values()))
        yield f"| {' | '.join(cells)} |"


def contraction_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of Lemma 1 to 3: contractions, the cosine that is needed, β's interval."""
    yield (
        "| task | method | best γ | γ, leader's k | own γ, chunks | γ, chunks | cosine"
        " | needed | β from | to |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        gamma = _mean(row, "contraction_true")
        root = math.sqrt(1 - gamma * gamma)
        ends = ((1 + gamma + sign * root) / (2 * (1 + gamma)) for sign in (-1, 1))
        keys = ("contraction_best", "contraction_leader", "contraction_own", "contraction_true")
        cells = (
            row["task"],
            row["method"],
            *(_over(row, key) for key in keys),
            _over(row, "accumulated_cosine"),
            _over(row, "cosine_needed"),
            *(f"{end:.2f}" for end in ends),
        )
        yield f"| {' | '.join(cells)} |"


def growth_table(row: Row) -> Iterator[str]:
    """Yield the lines of the density of a sum, by step, density and number of ranks."""
    (first, *_) = row["growth"].values()
    powers = [2**p for p in range(len(next(iter(first.values()))))]
    yield f"| step | density | {' | '.join(map(str, powers))} |"
    yield "|---" * (2 + len(powers)) + "|"
    for step, grown in row["growth"].items():
        for density, values in grown.items():
            cells = (step, f"{float(density):.1%}", *(f"{value:.1%}" for value in values))
            yield f"| {' | '.join(cells)} |"
    for density in first:
        size, k = 10**6, round(1e6 * float(density))
        uniform = (f"{expected_nnz(size, k, ranks) / size:.1%}" for ranks in powers)
        yield f"| at random | {float(density):.1%} | {' | '.join(uniform)} |"


def uniform_table(size: int = 512) -> Iterator[str]:
    """Yield the lines of SparCML's Figure 7: the expected nnz of a sum of random selections."""
    worlds = [2**p for p in range(1, 8)]
    yield f"| k of {size} | {' | '.join(f'P = {ranks}' for ranks in worlds)} |"
    yield "|---" * (1 + len(worlds)) + "|"
    for k in (1, 4, 16, 64, 128):
        yield f"| {k} | {' | '.join(f'{expected_nnz(size, k, ranks):.0f}' for ranks in worlds)} |"


def draw(rows: Sequence[Row], task: str) -> None:
    """Draw ξ, the coordinates sent, and the similarity of memories over the steps."""
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "sparcel"
    figure, (xis, counts, cosines) = plt.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
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
    xis.set(xlabel="step", ylabel="ξ", title=task)
    counts.set(xlabel="step", ylabel="sent / asked", yscale="log")
    cosines.set(xlabel="step", ylabel="cosine of two ranks' memories")
    xis.legend(fontsize="small")
    figure.savefig(FIGURES / f"signals_{task}.svg", metadata={"Date": None})
    plt.close(figure)


def _mean(row: Row, key: str) -> float:
    return mean(look[key] for look in row["looks"] if look[key] is not None)


def _over(row: Row, key: str) -> str:
    return f"{_mean(row, key):.2f}"


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of all tables, an empty one between two."""
    yield from (*counts_table(rows), "")
    yield from (*similarity_table(rows), "")
    yield from (*contraction_table(rows), "")
    for row in rows:
        if row["method"] == "topk":
            yield from (*growth_table(row), "")
    yield from uniform_table()


def main() -> None:
    rows = rows_of(RESULTS / "signals.json")
    print("\n".join(tables(rows)))
    for task in {row["task"] for row in rows}:
        draw(rows, task)


if __name__ == "__main__":
    main()
