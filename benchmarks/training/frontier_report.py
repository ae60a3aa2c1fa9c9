"""Tables of results.md and training.md, by what `frontier` recorded.

Dense training of 2000 steps is in the record of `convergence.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from statistics import geometric_mean, mean

from benchmarks.pages.tables import over_seeds, perplexity, points, table
from benchmarks.record import Row, is_todays, rows_of
from benchmarks.training.tasks import TASKS

DEFAULT = "bidirectional,1,packed:5/5,still"
WITH_MUON = "bidirectional,1,packed:8/8,still"
SPARSER = "bidirectional,0.1,packed:4,front"
FOUR_BITS = "bidirectional,1,raw:4"
SCALECOM = "scalecom,0.1,packed:4,front"
MODELS = {
    "words": "transformer, AdamW",
    "characters": "LSTM, SGD",
    "images": "ResNet, SGD",
    "intents": "convolution, SGD",
    "speech": "CNN, SGD",
    "articles": "transformer, AdamW",
    "news": "transformer, AdamW",
    "code": "transformer, AdamW",
    "code 6M": "transformer, AdamW",
    "code, Muon": "transformer, Muon",
    "reviews": "transformer, Muon",
}
"""What is trained on each task, and by which optimiser."""

CHOSEN = {
    "bf16": "torch's `bf16` hook",
    "powersgd,4": "torch's PowerSGD, rank 4",
    "powersgd,8": "torch's PowerSGD, rank 8",
    DEFAULT: "`attach`'s default",
    WITH_MUON: "`attach`'s default for Muon",
    FOUR_BITS: "everything in 4 bits, up and down",
    SPARSER: "`attach` at 10 %",
    SCALECOM: "`scalecom`, 10 %, `packed:4`",
}
"""What users choose among, with labels."""

BY_BITS = {
    SPARSER: "10 %, and 30 % of the sums back, in 4 bits",
    FOUR_BITS: "all in 4 bits",
    "bidirectional,1,packed:4/6,still": "all in 4 bits, 6 back",
    "bidirectional,1,packed:4/8,still": "all in 4 bits, 8 back",
    **{f"bidirectional,1,packed:{n}/{n},still": f"all in {n} bits" for n in (5, 6, 7, 8)},
    "bf16": "torch's `bf16` hook",
    "powersgd,4": "torch's PowerSGD, rank 4",
}
"""What travels, with labels: what Muon asks for."""

Setting = tuple[str, int, int]


def all_rows() -> list[Row]:
    """Return the runs of both records; dense training's ``share`` is 1."""
    return [row for row in _recorded() if is_todays(row)]


def rows_of_run(run: str) -> list[Row]:
    """Return those of a run and of dense training alone, whose rules are told in less time."""
    return [row for row in _recorded() if row["run"] in (run, "dense") and is_todays(row)]


def _recorded() -> list[Row]:
    dense = [
        {**row, "run": "dense", "share": 1.0}
        for row in rows_of("convergence")
        if row["method"] == "dense" and setting_of(row)[1:] == (8, 2000)
    ]
    return [*dense, *rows_of("frontier")]


def dense_of(rows: Sequence[Row]) -> Mapping[tuple[object, ...], Row]:
    """Return dense training's rows by setting and seed."""
    return {(*setting_of(row), row["seed"]): row for row in rows if row["run"] == "dense"}


def _beside(found: Sequence[Row], rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return rows with those of dense training with the same seeds."""
    dense = dense_of(rows)
    return [(row, dense[*setting_of(row), row["seed"]]) for row in found]


def over_dense(task: str, pairs: Sequence[tuple[Row, Row]]) -> str:
    """Return the perplexity of language models, the points of accuracy of others."""
    if not pairs:
        return ""
    if TASKS[task].kind == "language":
        return f"{over_seeds(perplexity(pairs), 1)} %"
    return over_seeds(points(pairs), 1)


def default_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of what the default ends at beside dense training, by task."""
    columns = (
        *("task", "trained", "dense loss", "seeds apart"),
        *("perplexity over dense", "accuracy over dense", "bytes"),
    )
    return table(
        columns, ((task, model, *_of_default(rows, task)) for task, model in MODELS.items())
    )


def _of_default(rows: Sequence[Row], task: str) -> Iterator[str]:
    run = WITH_MUON if TASKS[task].optimizer == "Muon" else DEFAULT
    base, found = (usual_of(rows, one, task) for one in ("dense", run))
    pairs = _beside(found, rows)
    losses = [row["loss"] for row in base]
    yield from (f"{mean(losses):.4f}", f"{max(losses) - min(losses):.4f}")
    yield from (f"{over_seeds(perplexity(pairs), 2)} %", over_seeds(points(pairs), 2))
    yield f"{mean(row['share'] for row in found):.1%}"


def other_settings_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of `bidirectional` with other settings, steps or ranks, by task."""
    shown: dict[tuple[Setting, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["task"], *_order(row))):
        usual = row["task"], 8, TASKS[row["task"]].steps
        other = setting_of(row) != usual or row["run"] not in CHOSEN
        if other and row["run"].startswith("bidirectional"):
            shown.setdefault((setting_of(row), row["run"]), []).append(row)
    columns = "task", "method", "ranks", "steps", "bytes", "accuracy", "perplexity"
    return table(columns, (_cells(run, found, rows) for (_, run), found in shown.items()))


def _cells(run: str, found: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    pairs = _beside(found, rows)
    return [
        *(found[0]["task"], run, *(str(found[0][key]) for key in ("ranks", "steps"))),
        f"{mean(row['share'] for row in found):.1%}",
        *(over_seeds(points(pairs), 2), f"{over_seeds(perplexity(pairs), 2)} %"),
    ]


def _order(row: Row) -> tuple[int, int, bool, str, int]:
    """Sort by setting; in it dense training first, then by name."""
    return row["ranks"], -row["steps"], row["run"] != "dense", row["run"], row["seed"]


def setting_of(row: Row) -> Setting:
    return row["task"], row["ranks"], row["steps"]


def search_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of what other settings of the default ended at, and of its own."""
    of_words = {row["run"] for row in rows if row["task"] == "words"}
    found = sorted(run for run in of_words if run.startswith("bidirectional"))
    tasks = "words", "characters", "images", "speech"
    columns = "method", "bytes of words", *tasks
    return table(columns, ([run, *_ends(rows, run, tasks)] for run in found))


def chosen_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of what users choose among: bytes and losses."""
    tasks = "words", "characters", "articles", "reviews", "news", "code", "code 6M", "images"
    cells = ([label, *_ends(rows, run, tasks, tasks)] for run, label in CHOSEN.items())
    return table(("method", "bytes", *tasks), cells)


def bits_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of what bits of values are worth, where Muon trains and where AdamW does."""
    tasks = "reviews", "code, Muon", "code"
    cells = (
        [label, share, _owed(rows, run), *ends]
        for run, label in BY_BITS.items()
        for share, *ends in [_ends(rows, run, tasks, tasks)]
    )
    columns = "what travels", "bytes", "owed", "reviews, Muon", "code, Muon", "code, AdamW"
    return table(columns, cells)


def _owed(rows: Sequence[Row], run: str) -> str:
    """Return the energy of what ranks owe together after a step of `code`, of the gradient's."""
    of_code = [*usual_of(rows, run, "code"), *usual_of(rows, run, "code, Muon")]
    found = [row["owed"] for row in of_code if "owed" in row]
    return f"{100 * mean(found):.2g} %" if found else ""


def size_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of what settings ended at over dense training on a larger model."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        of = found.setdefault(row["setting"], {"share": [100 * row["share"]]})
        of.setdefault(row["optimizer"], []).append(row["over_dense_percent"])
    cells = (
        [setting, f"{of['share'][0]:.0f}%"]
        + [f"{over_seeds(more, 1)} %" if (more := of.get(one)) else "" for one in ("AdamW", "Muon")]
        for setting, of in found.items()
        if setting != "dense"
    )
    return table(("what travels", "bytes", "AdamW", "Muon"), cells)


def _ends(
    rows: Sequence[Row], run: str, tasks: Sequence[str], sized: Sequence[str] = ("words",)
) -> Iterator[str]:
    """Yield a run's share of the bytes, and what it ended at over dense, by task.

    The share is that of the first of the tasks ``sized`` that the run has.
    """
    found = next(found for task in sized if (found := usual_of(rows, run, task)))
    yield f"{mean(row['share'] for row in found):.1%}"
    for task in tasks:
        yield over_dense(task, _beside(usual_of(rows, run, task), rows))


def usual_of(rows: Sequence[Row], run: str, task: str) -> list[Row]:
    """Return a run's rows on a task with 8 ranks and the task's number of steps."""
    usual = task, 8, TASKS[task].steps
    found = (row for row in rows if row["run"] == run and setting_of(row) == usual)
    return sorted(found, key=_order)


def steps_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of how many steps methods need for dense training's loss, by task."""
    tasks = "words", "images", "code, Muon", "code", "code 6M"
    cells = (
        [label, *(_factors(rows, run, task) for task in tasks)]
        for run, label in (BY_BITS | CHOSEN).items()
    )
    return table(("method", *tasks), cells)


def _factors(rows: Sequence[Row], run: str, task: str) -> str:
    """Return the mean of the factors, and of several seeds the least and the largest."""
    found = step_factors(rows, run, task)
    if not found:
        return ""
    shorter, usual = _lengths(rows, task)
    if max(found) > usual / shorter:
        return f"over {usual / shorter:.0f}"  # nobody trained as short as that
    several = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
    return f"{geometric_mean(found):.2f}{several}"


def step_factors(rows: Sequence[Row], run: str, task: str) -> list[float]:
    """Return how many times dense training's steps a run needs for the same loss, by seed.

    Dense training's loss falls about as the logarithm of its steps, between trainings of two
    lengths that each end at their own lowest rate. What a run ends above dense training with its
    seed, over this slope, is the logarithm of its factor. Empty where dense trainings of one length
    alone are known, or the longer ones end no lower.
    """
    shorter, usual = _lengths(rows, task)
    dense, found = dense_of(rows), usual_of(rows, run, task)
    ends = {
        steps: {seed: row for (*at, seed), row in dense.items() if at == [task, 8, steps]}
        for steps in (shorter, usual)
    }
    both = ends[shorter].keys() & ends[usual].keys()
    if shorter == usual or not both:
        return []
    rise = mean(ends[shorter][seed]["loss"] - ends[usual][seed]["loss"] for seed in both)
    slope = rise / log(usual / shorter)
    lost = [row["loss"] - dense[*setting_of(row), row["seed"]]["loss"] for row in found]
    return [exp(one / slope) for one in lost] if slope > 0 else []


def _lengths(rows: Sequence[Row], task: str) -> tuple[int, int]:
    """Return the steps of the longest shorter dense training of a task, and those of a usual one.

    The same twice if there is no shorter one.
    """
    usual = TASKS[task].steps
    steps = {row["steps"] for row in rows if (row["run"], row["task"]) == ("dense", task)}
    return max((one for one in steps if one < usual), default=usual), usual
