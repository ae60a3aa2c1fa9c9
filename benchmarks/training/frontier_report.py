"""Tables and plots of docs/explanation/experiments.md: what training ends at for its bytes.

    python -m benchmarks.training.frontier_report

prints the tables as Markdown and draws ``docs/figures/frontier_TASK.svg`` for the tasks of the
suite, from the records of `frontier.py`, of `adam.py` and, for dense training, of `convergence.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp
from statistics import mean

from benchmarks.pages.tables import (
    BESIDE,
    DENSE,
    POWERSGD,
    ROUNDED,
    SPARCEL,
    apart,
    over_seeds,
    plain,
    save,
    subplots,
    table,
)
from benchmarks.record import RESULTS, Row, rows_of
from benchmarks.training.convergence import SUITE
from benchmarks.training.tasks import TASKS

COLUMNS = (
    *("method", "ranks", "steps", "seeds", "bytes", "accuracy", "over dense"),
    *("loss", "perplexity over dense"),
)

ADAM = "task", "method", "changed", "seeds", "accuracy", "loss", "perplexity over as it is"

CHOSEN = {
    "bf16": ("torch's `bf16` hook", "gloo bfloat16"),
    "powersgd,4": ("torch's PowerSGD, rank 4", ""),
    "powersgd,8": ("torch's PowerSGD, rank 8", ""),
    "bidirectional,0.1,packed:4,front": ("`attach`'s default", "default"),
    "bidirectional,1,raw:4": ("`attach(model, density=1)`", "all, 4 bits"),
    "scalecom,0.1,packed:4,front": ("`scalecom`, 10 %, `packed:4`", "scalecom 10 %, packed:4"),
}
"""What users choose among: labels, and names in the record of processor time."""

IN_POINTS = "images", "speech"
"""The tasks of which these tables show accuracy; of the others they show perplexity."""

Setting = tuple[str, int, int]


def all_rows() -> list[Row]:
    """Return the runs of both records; dense training's ``share`` is 1."""
    suite = rows_of(RESULTS / "convergence.json")
    dense = [
        {**row, "run": "dense", "share": 1.0}
        for row in suite
        if row["method"] == "dense" and _setting(row)[1:] == (8, 2000)
    ]
    return [*dense, *rows_of(RESULTS / "frontier.json")]


def tasks_of(rows: Sequence[Row]) -> list[str]:
    """Return the tasks that another method than dense training was run on."""
    return sorted({row["task"] for row in rows if row["run"] != "dense"})


def _dense(rows: Sequence[Row]) -> Mapping[tuple[object, ...], Row]:
    """Return dense training's rows by setting and seed."""
    return {(*_setting(row), row["seed"]): row for row in rows if row["run"] == "dense"}


def _over_dense(
    found: Sequence[Row], dense: Mapping[tuple[object, ...], Row]
) -> tuple[list[float], list[float]]:
    """Return points of accuracy and % of perplexity over dense training with the same seeds."""
    pairs = [(row, dense[*_setting(row), row["seed"]]) for row in found]
    points = [100 * (row["accuracy"] - base["accuracy"]) for row, base in pairs]
    return points, [100 * (exp(row["loss"] - base["loss"]) - 1) for row, base in pairs]


def frontier_table(rows: Sequence[Row], task: str) -> Iterator[str]:
    """Return the lines of a task's table, each method beside dense training with the same seeds."""
    of_task = [row for row in rows if row["task"] == task]
    dense = _dense(of_task)
    runs: dict[tuple[Setting, str], list[Row]] = {}
    for row in sorted(of_task, key=_order):
        runs.setdefault((_setting(row), row["run"]), []).append(row)
    return table(COLUMNS, (_cells(run, found, dense) for (_, run), found in runs.items()))


def _order(row: Row) -> tuple[int, int, bool, str, int]:
    """Sort by setting; in it dense training first, then by name."""
    return row["ranks"], -row["steps"], row["run"] != "dense", row["run"], row["seed"]


def _setting(row: Row) -> Setting:
    return row["task"], row["ranks"], row["steps"]


def _cells(run: str, found: Sequence[Row], dense: Mapping[tuple[object, ...], Row]) -> list[str]:
    points, more = _over_dense(found, dense)
    beside = over_seeds(points, 2), over_seeds(more, 2) + " %"
    if run == "dense":
        beside = apart([100 * row["accuracy"] for row in found], 2), ""
    return [
        run,
        *(str(found[0][key]) for key in ("ranks", "steps")),
        str(len(found)),
        f"{mean(row['share'] for row in found):.1%}",
        f"{mean(row['accuracy'] for row in found):.2%}",
        beside[0],
        f"{mean(row['loss'] for row in found):.4f}",
        beside[1],
    ]


def adam_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of what `adam.py` changed, beside the same training as it is."""
    return table(ADAM, _adam_cells(rows))


def _adam_cells(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    base = {(row["task"], row["run"], row["seed"]): row for row in rows if row["way"] == "as it is"}
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["run"], row["way"], row["seed"])):
        found.setdefault((row["task"], row["run"], row["way"]), []).append(row)
    for (task, run, way), runs in found.items():
        more = [100 * (exp(row["loss"] - base[task, run, row["seed"]]["loss"]) - 1) for row in runs]
        accuracy, loss = (mean(row[key] for row in runs) for key in ("accuracy", "loss"))
        beside = f"{over_seeds(more, 1)} %"
        yield task, run, way, str(len(runs)), f"{accuracy:.2%}", f"{loss:.4f}", beside


def search_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of what other settings of the default ended at, and of its own."""
    of_words = {row["run"] for row in rows if row["task"] == "words"}
    found = sorted(run for run in of_words if run.startswith("bidirectional"))
    tasks = "words", "characters", "images", "speech"
    columns = "method", "bytes of words", *tasks
    return table(columns, ([run, *_ends(rows, run, tasks)] for run in found))


def chosen_table(rows: Sequence[Row], times: Sequence[Row]) -> Iterator[str]:
    """Return the lines of what users choose among: bytes, losses and processor time."""
    took = {row["name"]: f"{row['core_ns']:.1f}" for row in times if row["ranks"] == 4}
    tasks = "words", "characters", "articles", "reviews", "news", "images"
    columns = "method", "bytes of words", *tasks, "ns a parameter"
    cells = (
        [label, *_ends(rows, run, tasks), took.get(name, "")]
        for run, (label, name) in CHOSEN.items()
    )
    return table(columns, cells)


def _ends(rows: Sequence[Row], run: str, tasks: Sequence[str]) -> Iterator[str]:
    """Yield a run's share of the bytes of words, and what it ended at over dense, by task."""
    dense, found = _dense(rows), {task: list[Row]() for task in ("words", *tasks)}
    for row in sorted(rows, key=_order):
        usual = row["task"], 8, TASKS[row["task"]].steps
        if row["run"] == run and row["task"] in found and _setting(row) == usual:
            found[row["task"]].append(row)
    yield f"{mean(row['share'] for row in found['words']):.1%}"
    for task in tasks:
        points, more = _over_dense(found[task], dense)
        shown, unit = (points, "") if task in IN_POINTS else (more, " %")
        yield over_seeds(shown, 1) + unit if shown else ""


def draw(rows: Sequence[Row], task: str) -> None:
    """Draw the loss at the end against the share of the bytes, the mean over the seeds."""
    shown = [row for row in rows if _setting(row) == (task, 8, 2000)]
    figure, axes = subplots()
    hooks: dict[str, tuple[float, float]] = {}
    markers = iter("o^vDP*Xph<>d8")
    for run in dict.fromkeys(row["run"] for row in sorted(shown, key=_order)):
        found = [row for row in shown if row["run"] == run]
        place = 100 * mean(row["share"] for row in found), mean(row["loss"] for row in found)
        scheme, *settings = run.split(",")
        if scheme == "powersgd":
            hooks[settings[0]] = place
        elif scheme in ("dense", "bf16"):
            colour = DENSE if scheme == "dense" else ROUNDED
            axes.plot(*place, "s", color=colour, label="dense" if colour == DENSE else "bfloat16")
        else:
            densities = " / ".join(f"{100 * float(one):.0f}" for one in settings[0].split("/"))
            name = ", ".join([f"{scheme} {densities} %", *settings[2:]])
            axes.plot(*place, next(markers), color=SPARCEL, label=name)
    if hooks:
        axes.plot(
            *zip(*hooks.values(), strict=True), "o-", color=POWERSGD, label="PowerSGD, by rank"
        )
    for rank, place in hooks.items():
        axes.annotate(rank, place, (6, 3), textcoords="offset points", color=POWERSGD)
    axes.set(xscale="log", xlabel="bytes, % of dense float32", ylabel="loss at the end")
    axes.set(xlim=(2.5, 150), title=f"{task}; sparse schemes with values of 4 bits")
    plain(axes.xaxis)
    axes.legend(**BESIDE)
    save(figure, f"frontier_{task}")


def draw_all() -> None:
    """Draw the figures."""
    rows = all_rows()
    for task in tasks_of(rows):
        if task in SUITE:
            draw(rows, task)


def main() -> None:
    rows = all_rows()
    for task in tasks_of(rows):
        print(f"### {task}\n")
        print("\n".join(frontier_table(rows, task)), end="\n\n")
    print("\n".join(search_table([*rows, *rows_of(RESULTS / "search.json")])), end="\n\n")
    print("\n".join(chosen_table(rows, rows_of(RESULTS / "core_time.json"))), end="\n\n")
    print("\n".join(adam_table(rows_of(RESULTS / "adam.json"))))
    draw_all()


if __name__ == "__main__":
    main()
