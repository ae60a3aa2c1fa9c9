"""Tables and plots of docs/explanation/experiments.md, about what training ends at.

They are made from the records of `causes.py` and `convergence.py`.

    python -m benchmarks.training.convergence_report

prints the tables as Markdown and draws ``docs/figures/convergence_TASK.svg``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import mean

from benchmarks.pages.tables import BESIDE, DENSE, apart, over_seeds, plain, save, subplots, table
from benchmarks.record import RESULTS, Row, rows_of

CAUSES = "variant", "seeds", "accuracy", "loss", "dead units", "early update", "wait", "density"
SUITE = "method", "seeds", "accuracy", "over dense", "loss", "over dense", "sent", "bytes"
PUT_BACK = (
    *("dense", "gtopk put_back=own", "gtopk"),
    *("oktopk put_back=own", "oktopk, owners keep", "oktopk"),
)
SWEEPS = (
    *("task", "method", "ranks", "batch", "steps", "asked", "sent"),
    *("accuracy", "over dense", "loss", "over dense"),
)
RECIPES = (
    *("recipe", "batch", "steps", "seeds", "dense accuracy", "accuracy", "seeds' differences"),
    *("mean", "dense loss", "loss", "seeds' differences", "mean", "sent"),
)


def causes_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of a table with the means over seeds of each variant."""
    return table(
        CAUSES,
        (
            (
                variant,
                str(len(runs)),
                _mean(runs, "accuracy", "{:.2%}"),
                _mean(runs, "loss", "{:.4f}"),
                _mean(runs, "dead_units", "{:.0%}"),
                _mean(runs, "update_norm_first_tenth", "{:.2f}"),
                _mean(runs, "wait_steps", "{:.0f}"),
                _mean(runs, "mean_density", "{:.1%}"),
            )
            for variant, runs in _grouped(rows, "variant")
        ),
    )


def suite_table(rows: Sequence[Row], task: str) -> Iterator[str]:
    """Return the lines of a task's table: each method beside dense training with the same seed."""
    of_task = [row for row in rows if row["task"] == task]
    dense = {row["seed"]: row for row in of_task if row["method"] == "dense"}
    return table(
        SUITE, (_suite_cells(method, runs, dense) for method, runs in _grouped(of_task, "method"))
    )


def _suite_cells(method: str, runs: Sequence[Row], dense: Mapping[int, Row]) -> Sequence[str]:
    pairs = [(run, dense[run["seed"]]) for run in runs if run["seed"] in dense]
    points = [100 * (run["accuracy"] - base["accuracy"]) for run, base in pairs]
    losses = [run["loss"] - base["loss"] for run, base in pairs if run["loss"] is not None]
    volume = mean(run["bytes_a_step"] / base["bytes_a_step"] for run, base in pairs)
    beside = over_seeds(points, 2), over_seeds(losses, 4) if len(losses) == len(pairs) else ""
    if method == "dense":
        beside = (
            apart([100 * run["accuracy"] for run in runs], 2),
            apart([run["loss"] for run in runs], 4),
        )
    return (
        method,
        str(len(runs)),
        _mean(runs, "accuracy", "{:.2%}"),
        beside[0],
        _mean(runs, "loss", "{:.4f}"),
        beside[1],
        _mean(runs, "density_before", "{:.1%}"),
        f"{volume:.1%}",
    )


def put_back_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of a table by whose memory keeps what does not win, of seed 0."""
    found = {(row["task"], row["method"]): row for row in rows if row["seed"] == 0}
    tasks = dict.fromkeys(row["task"] for row in rows if row["method"] == PUT_BACK[3])

    def cell(run: Row | None) -> str:
        return f"{run['accuracy']:.2%}, loss {run['loss']:.4f}" if run else ""

    return table(
        ("task", *PUT_BACK),
        ((task, *(cell(found.get((task, method))) for method in PUT_BACK)) for task in tasks),
    )


def sweeps_table(sweeps: Sequence[Row], suite: Sequence[Row]) -> Iterator[str]:
    """Return the lines of the runs with other densities, batches and numbers of ranks."""
    dense = {_setting(row): row for row in (*suite, *sweeps) if row["method"] == "dense"}
    others = [row for row in sweeps if row["method"] != "dense"]
    others.sort(key=lambda row: (_setting(row), row["density_before"]))
    return table(
        SWEEPS,
        (
            (
                row["task"],
                row["method"],
                str(row["ranks"]),
                str(row["batch"]),
                str(row["steps"]),
                f"{row['density']:.1%}",
                f"{row['density_before']:.1%}",
                *beside(row, dense[_setting(row)]),
            )
            for row in others
        ),
    )


def _setting(row: Row) -> tuple[str, int, int, int]:
    return row["task"], row["ranks"], row["batch"], row["seed"]


def recipes_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of the papers' recipes, each beside dense training with the same seeds."""
    dense = {_training(row): row for row in rows if row["method"] == "dense"}
    found: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        if row["method"] != "dense":
            found.setdefault((row["recipe"], row["steps"]), []).append(row)

    def cells(recipe: str, runs: Sequence[Row]) -> Iterator[str]:
        pairs = [(run, dense[_training(run)]) for run in runs]
        yield from (recipe, str(runs[0]["batch"]), str(runs[0]["steps"]), str(len(runs)))
        for key, unit, digits, form in (("accuracy", 100, 2, "{:.2%}"), ("loss", 1, 4, "{:.4f}")):
            values = [unit * (run[key] - base[key]) for run, base in pairs]
            yield _mean([base for _, base in pairs], key, form)
            yield _mean(runs, key, form)
            yield ", ".join(f"{value:+.{digits}f}" for value in values)
            yield over_seeds(values, digits) if len(values) > 2 else ""
        yield _mean(runs, "density_before", "{:.1%}")

    yield from table(RECIPES, (cells(recipe, runs) for (recipe, _), runs in sorted(found.items())))


def _training(row: Row) -> tuple[int, int, int]:
    return row["batch"], row["steps"], row["seed"]


def beside(row: Row, base: Row) -> Sequence[str]:
    """Return the accuracy and the loss of a run, each followed by its difference."""
    return (
        f"{row['accuracy']:.2%}",
        f"{100 * (row['accuracy'] - base['accuracy']):+.2f}",
        f"{row['loss']:.4f}",
        f"{row['loss'] - base['loss']:+.4f}",
    )


def draw(rows: Sequence[Row], task: str) -> None:
    """Draw the training loss of each method with seed 0 against the steps, the baseline in bold."""
    figure, axes = subplots()
    for row in rows:
        if row["task"] == task and row["seed"] == 0 and ", " not in row["method"]:
            losses = [math.nan if loss is None else loss for loss in row["train_losses"]]
            steps = [row["steps"] * (place + 0.5) / len(losses) for place in range(len(losses))]
            dense = {"color": DENSE, "linewidth": 2.0}
            style = dense if row["method"] == "dense" else {"linewidth": 1}
            axes.plot(steps, losses, label=row["method"], **style)
    axes.set(xlabel="step", ylabel="training loss", title=task, yscale="log")
    plain(axes.yaxis)
    axes.legend(**BESIDE)
    save(figure, f"convergence_{task}")


def _grouped(rows: Iterable[Row], key: str) -> Iterator[tuple[str, list[Row]]]:
    """Group rows by a value, in the order in which the values appear first."""
    order: dict[str, int] = {}
    rows = list(rows)
    for row in rows:
        order.setdefault(row[key], len(order))
    ordered = sorted(rows, key=lambda row: (order[row[key]], row["seed"]))
    for value, members in groupby(ordered, key=lambda row: str(row[key])):
        yield value, list(members)


def _mean(rows: Sequence[Row], key: str, form: str) -> str:
    values = [row[key] for row in rows]
    return "diverged" if None in values else form.format(mean(values))


def _tasks(rows: Iterable[Row]) -> list[str]:
    return [task for task, _ in _grouped((row for row in rows if row["method"] != "dense"), "task")]


def draw_all() -> None:
    """Draw the figures."""
    rows = rows_of(RESULTS / "convergence.json")
    for task in _tasks(rows):
        draw(rows, task)


def main() -> None:
    print("\n".join(causes_table(rows_of(RESULTS / "causes.json"))), end="\n\n")
    rows = rows_of(RESULTS / "convergence.json")
    print("\n".join(put_back_table(rows)), end="\n\n")
    for task in _tasks(rows):
        print(f"### {task}\n")
        print("\n".join(suite_table(rows, task)), end="\n\n")
    print("\n".join(sweeps_table(rows_of(RESULTS / "convergence_sweeps.json"), rows)), end="\n\n")
    print("\n".join(recipes_table(rows_of(RESULTS / "papers_recipes.json"))), end="\n\n")
    draw_all()


if __name__ == "__main__":
    main()
