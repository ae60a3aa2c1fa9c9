"""Tables of docs/explanation/why.md and docs/records/training.md: what training ends at, and why.

    python -m benchmarks.training.convergence_report

prints them as Markdown, from the records of `causes.py`, `convergence.py` and `papers_recipes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp
from statistics import mean

from benchmarks.pages.tables import over_seeds, table
from benchmarks.record import Row, shown_of

CAUSES = {
    "dense": "dense",
    "dense, 4 steps late": "dense, applied 4 steps late",
    "dense, 77 steps late": "dense, applied 77 steps late",
    "k, without memory": "1 %, without memory",
    "k, memory decays by 0.95": "1 %, memory decays by 0.95",
    "k": "1 %, with memory",
    "k, density 3 %": "3 %, with memory",
    "k, last 25 % dense": "1 %, the last quarter dense",
    "k, ahead": "1 %, one step ahead",
    "k, ahead by 10": "1 %, ten steps ahead",
    "k, both": "1 %, ahead and front-loaded",
    "k, both, owners keep": "the same, owners keep what does not win",
    "scalecom": "one coordinate of each 100, by one rank",
    "scalecom, ahead": "the same, one step ahead",
    "EF21": "1 %, EF21's estimates for a memory",
}
"""The variants of `causes.py` that why.md shows, with its words for them."""

TASKS = "words", "characters", "images", "speech", "intents"
IN_PERPLEXITY = "words", "characters"
"""The tasks of which tables show perplexity; of the others they show points of accuracy."""


def causes_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of a table of what each variant ended at, of one seed."""
    found = {row["variant"]: row for row in rows}
    columns = "variant", "accuracy", "loss", "dead units", "wait", "sent"
    return table(columns, ([name, *_cause(found[key])] for key, name in CAUSES.items()))


def _cause(row: Row) -> Iterator[str]:
    yield f"{row['accuracy']:.1%}"
    yield "diverged" if row["loss"] is None else f"{row['loss']:.3f}"
    yield f"{row['dead_units']:.0%}"
    yield "" if row["wait_steps"] is None else f"{row['wait_steps']:.0f}"
    yield f"{row['mean_density']:.1%}"


def suite_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of what sparcel's methods ended at over dense training, same seeds."""
    dense = {(row["task"], row["seed"]): row for row in rows if row["method"] == "dense"}
    of_words = {row["method"] for row in rows if row["task"] == "words"} - {"dense", "gaussiank"}
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if row["method"] in of_words:
            runs.setdefault(row["method"], []).append(row)
    columns = "method", "bytes of words", *TASKS
    return table(columns, ([method, *_ends(found, dense)] for method, found in runs.items()))


def _ends(runs: Sequence[Row], dense: dict[tuple[str, int], Row]) -> Iterator[str]:
    words = [(run, dense["words", run["seed"]]) for run in runs if run["task"] == "words"]
    yield f"{mean(run['bytes_a_step'] / base['bytes_a_step'] for run, base in words):.1%}"
    for task in TASKS:
        found = [(run, dense[task, run["seed"]]) for run in runs if run["task"] == task]
        if task in IN_PERPLEXITY:
            over = [100 * (exp(run["loss"] - base["loss"]) - 1) for run, base in found]
        else:
            over = [100 * (run["accuracy"] - base["accuracy"]) for run, base in found]
        unit = " %" if task in IN_PERPLEXITY else ""
        yield over_seeds(over, 1) + unit if found else ""


def sweeps_table(sweeps: Sequence[Row], suite: Sequence[Row]) -> Iterator[str]:
    """Return the lines of the runs with other densities, batches and numbers of ranks."""
    dense = {_setting(row): row for row in (*suite, *sweeps) if row["method"] == "dense"}
    others = [
        row
        for row in sweeps
        if row["task"] in TASKS and row["method"] != "dense" and "250 steps" not in row["method"]
    ]
    others.sort(key=lambda row: (_setting(row), row["density_before"]))
    columns = "task", "method", "ranks", "batch", "asked", "accuracy", "perplexity"
    return table(columns, (_sweep(row, dense[_setting(row)]) for row in others))


def _sweep(row: Row, base: Row) -> Iterator[str]:
    yield from (row["task"], row["method"])
    yield from (str(row[key]) for key in ("ranks", "batch"))
    yield f"{row['density']:.1%}"
    yield f"{100 * (row['accuracy'] - base['accuracy']):+.2f}"
    yield f"{100 * (exp(row['loss'] - base['loss']) - 1):+.1f} %"


def _setting(row: Row) -> tuple[str, int, int, int]:
    return row["task"], row["ranks"], row["batch"], row["seed"]


def recipes_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of the papers' recipes, each beside dense training with the same seeds."""
    dense = {_training(row): row for row in rows if row["method"] == "dense"}
    found: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        if row["method"] != "dense":
            found.setdefault((row["recipe"], row["steps"]), []).append(row)
    columns = "recipe", "batch", "steps", "seeds", "dense", "accuracy", "over dense", "sent"
    return table(
        columns, (_recipe(recipe, found[recipe, steps], dense) for recipe, steps in sorted(found))
    )


def _recipe(
    recipe: str, runs: Sequence[Row], dense: dict[tuple[int, int, int], Row]
) -> Iterator[str]:
    pairs = [(run, dense[_training(run)]) for run in runs]
    yield from (recipe, str(runs[0]["batch"]), str(runs[0]["steps"]), str(len(runs)))
    yield f"{mean(base['accuracy'] for _, base in pairs):.2%}"
    yield f"{mean(run['accuracy'] for run in runs):.2%}"
    yield over_seeds([100 * (run["accuracy"] - base["accuracy"]) for run, base in pairs], 2)
    yield f"{mean(run['density_before'] for run in runs):.1%}"


def _training(row: Row) -> tuple[int, int, int]:
    return row["batch"], row["steps"], row["seed"]


def main() -> None:
    suite = shown_of("convergence")
    for lines in (
        causes_table(shown_of("causes")),
        suite_table(suite),
        sweeps_table(shown_of("convergence_sweeps"), suite),
        recipes_table(shown_of("papers_recipes")),
    ):
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
