"""A plan as people read it: a table, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from sparcel.core.formats import RAW
from sparcel.core.schemes import RECOMMENDED, front_loaded
from sparcel.tools.plan import recorded
from sparcel.tools.plan.planner import WORTH, Plan
from sparcel.tools.plan.recorded import BETWEEN, LIKE, POWERSGD, UNNAMED, Recorded
from sparcel.tools.plan.steps import BASELINE, MOST_WAITING, OUTER, PlannedStep


def parts(plan: Plan) -> Iterator[str | Table]:
    """Yield what to print of a plan, with empty lines between."""
    yield from (assumptions(plan), "", table(plan), "", verdict(plan), "")
    yield from (not_counted(plan), "", legend(plan))
    if told := sources(plan):
        yield from ("", told)


def table(plan: Plan) -> Table:
    """Return every method's step, the fastest to a loss first, and outer steps below them."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1))
    shown.add_column("method", no_wrap=True)
    shown.add_column("sends", no_wrap=True)
    for title in ("step", "exposed", "ahead", "work", "exchange"):
        shown.add_column(f"{title}\nms", justify="right")
    shown.add_column("sent\nMB", justify="right")
    shown.add_column("steps\n×", justify="right")
    shown.add_column("faster\n×", justify="right")
    baseline = next(row for row in plan.rows if row.method == BASELINE)
    for row in (*plan.rows, *plan.outer):
        times = (row.step, row.exposed, row.ahead, row.work, row.exchange)
        shown.add_row(
            row.method,
            _sends(row),
            *map(_ms, times),
            _short(row.bytes / 1e6),
            "" if row.factor is None else f"{row.factor:.2f}",
            f"{x:.2f}" if (x := baseline.step / row.to_loss) < 100 else _short(x),
        )
    return shown


def sources(plan: Plan) -> str:
    """Return the records behind the column *steps*, with the commits that trained; "" if none."""
    methods: dict[str, list[str]] = {}
    for row in plan.rows:
        if (known := _recorded(plan, row)) is not None:
            seeds = ", one seed" if known.seeds == 1 else ""
            trained = f"{known.record}, {' to '.join(dict.fromkeys(known.commits))}{seeds}"
            methods.setdefault(trained, []).append(row.method)
    told = "; ".join(f"{', '.join(names)}: {trained}" for trained, names in methods.items())
    return told and (
        "Recorded in benchmarks/results of the sources, at these commits, whose rules are those of"
        f" today: {told}."
    )


_TRAINED = {
    "words": "a language model of 0.2 M parameters with AdamW",
    "code": "a language model of 1.3 M parameters with AdamW",
    "images": "a ResNet of 0.08 M parameters with SGD",
    "code, Muon": "a language model of 1.3 M parameters with Muon",
}


def legend(plan: Plan) -> str:
    """Return what the table's columns mean."""
    trained = " and ".join(_TRAINED[task] for task in LIKE[plan.kind])
    harder = "the harder of " if len(LIKE[plan.kind]) > 1 else ""
    return (
        f"faster: how many times sooner it comes to the same loss than {BASELINE}, overlapped."
        " exposed: what the step takes beyond its computation. ahead: step-ahead, before the"
        " forward pass. work: to select, pack and add up. steps: how many times dense training's"
        f" steps it needs for the same loss, recorded on {harder}{trained}; blank where none"
        " was recorded at this density and format, and then faster takes it as 1."
    )


def assumptions(plan: Plan) -> str:
    """Return what the plan is for, in a few lines."""
    work, rates = plan.workload, plan.rates
    nodes = rates.ranks // rates.ranks_per_node
    measured = " measured" if rates.measured else ""
    said = f" ({rates.description})" if rates.description else ""
    length = ""
    if work.steps is not None:
        length = (
            f"\nMeans over {work.steps:,} steps at {100 * work.density:g} %, more in the first."
        )
    outer = f"\nOuter steps every {work.every} steps, in shares of a step." if plan.outer else ""
    return (
        f"{work.model.name}: {work.model.parameters:,} gradients, {_ms(work.compute_s)} ms to"
        f" compute, in buckets of {work.bucket_bytes / (1 << 20):g} MiB.\n"
        f"{nodes} {_plural('node', nodes)} of {rates.ranks_per_node}"
        f" {_plural('rank', rates.ranks_per_node)}, {bits(rates.bandwidth)}{measured}{said};"
        f" {plan.topology}.{length}{outer}"
    )


def verdict(plan: Plan) -> str:
    """Return which method to use, with the numbers that decide."""
    advice = _in_every_step(plan)
    if plan.instead is None:
        return f"{advice}\n\n{_no_outer(plan)}" if plan.outer else advice
    return (
        f"{_outer(plan, plan.instead)}\n\nWith an exchange in every step,"
        f" {advice[0].lower()}{advice[1:]}"
    )


def _outer(plan: Plan, outer: PlannedStep) -> str:
    """Return that outer steps are advised, and why."""
    fastest, steps = plan.fastest, plan.workload.steps
    times = "" if steps is None else f", {steps // outer.every:,} times in all"
    return (
        f"Use outer steps, every {outer.every} steps: with {outer.method} {_told(outer)}; the"
        f" exchange takes {100 * outer.share:.0f} % of the time. Of the methods that exchange in"
        f" every step, the fastest, {fastest.method}, takes {_ms(fastest.step)} ms and"
        f" {_waiting(fastest)}.\n\nThey change training: machines average every {outer.every} steps"
        f" only{times}, and train apart in between. Compare with dense training."
    )


def _no_outer(plan: Plan) -> str:
    """Return what outer steps would take where they are not advised."""
    outer = next(row for row in plan.outer if row.method == OUTER)
    return (
        f"Outer steps are a choice of their own, because machines train apart in between: every"
        f" {outer.every} steps, with {outer.method}, a step takes {_ms(outer.step)} ms. They are"
        f" advised where all others wait for more than {100 * MOST_WAITING:.0f} % of a step; here"
        f" {plan.fastest.method} {_waiting(plan.fastest)}."
    )


def _waiting(row: PlannedStep) -> str:
    return f"waits for {100 * row.exposed / row.step:.0f} % of it"


def _in_every_step(plan: Plan) -> str:
    """Return which of the methods to use that exchange in every step."""
    dense, sparse = plan.best_dense, plan.best_sparse
    times = dense.to_loss / sparse.to_loss
    if plan.advised is dense:
        compared = f"{1 / times:.2f} times as long" if times <= 1 else f"{times:.2f} times as fast"
        first = (
            f"Stay dense: with {dense.method} {_told(dense)}. The best of the others,"
            f" {sparse.method}, takes {_ms(sparse.step)} ms and {_mb(sparse)}, {compared} to"
            " the same loss."
        )
        return f"{first} {_flip(plan)}"
    beside = "" if plan.fastest is sparse else f" No other is {WORTH} times as fast."
    return (
        f"Use {sparse.method}{_call(plan, sparse)}: {_told(sparse)}. The best dense method,"
        f" {dense.method}, takes {_ms(dense.step)} ms and {_mb(dense)}, {times:.1f} times as long"
        " to the same loss."
        f"{beside} {_flip(plan)}\n\n{_caution(plan, sparse)}"
    )


def _call(plan: Plan, row: PlannedStep) -> str:
    """Return the call of a method whose name does not tell it."""
    if row.method == POWERSGD:
        return ", torch's powerSGD_hook"
    own, settings = row.method.removesuffix(BETWEEN), recorded.own_settings(plan.kind)
    if own not in settings or row.method == UNNAMED:
        return ""
    usual = settings[own] == RECOMMENDED
    given = "" if usual else ", ".join(f"{name}={it!r}" for name, it in settings[own].items())
    if row.method == own:
        return f", attach(model, {given})"
    return f", attach(model, sparcel.Hierarchical(sparcel.scheme({given})))"


def _recorded(plan: Plan, row: PlannedStep) -> Recorded | None:
    """Return the trainings that were recorded with a method as it is planned."""
    return recorded.recorded(row.method, plan.workload.density, row.format, plan.kind)


def _caution(plan: Plan, row: PlannedStep) -> str:
    """Return what a method lost in recorded trainings."""
    what = "what is rounded away is" if row.density == 1 else "coordinates are"
    larger = ""
    if row.method == POWERSGD:
        what, larger = "what has a higher rank is", " Larger language models needed more."
    changes = f"It changes training: {what} applied later."
    known = _recorded(plan, row)
    if known is None:
        return (
            f"{changes} No training at this density and format was recorded. Compare with dense"
            " training."
        )
    task = known.hardest(plan.kind)
    factor = f"it needs {known.factor(plan.kind):.2f} times the steps of dense training for the"
    return (
        f"{changes} In recorded trainings {_lost(known)}: on {_TRAINED[task]} {factor} same"
        f" loss{_by_seed(known.factors[task])}.{larger}{_safer(plan, row, known)} Compare with"
        " dense training."
    )


def _lost(known: Recorded) -> str:
    """Return what a method ended at."""
    seeds = f"{recorded.RANKS} ranks, {known.seeds} {_plural('seed', known.seeds)}"
    more = "more" if known.perplexity > 0 else "less"
    perplexity = f"had {abs(known.perplexity):.1f} % {more} perplexity"
    if not known.points:
        return f"({seeds}) it {perplexity}"
    points, task = known.worst
    return (
        f"({len(recorded.TASKS)} small tasks, {recorded.STEPS:,} steps, {seeds}) it lost"
        f" {max(0.0, -points):.1f} points of accuracy on its worst task, {task}, and {perplexity}"
        " on words"
    )


def _by_seed(factors: Sequence[float]) -> str:
    """Return the least and the largest of several seeds' factors."""
    return f" ({min(factors):.2f} to {max(factors):.2f} by seed)" if len(factors) > 1 else ""


def _safer(plan: Plan, row: PlannedStep, known: Recorded) -> str:
    """Return what `UNNAMED` takes, if it lost less than a method that is advised before it."""
    unnamed = next((one for one in plan.rows if one.method == UNNAMED), row)
    own = _recorded(plan, unnamed)
    if own is None or not own.loses_less(known):
        return ""
    points = f"{max(0.0, -own.worst[0]):.1f} points and " if own.points else ""
    return (
        f" With {UNNAMED} it was {points}{own.perplexity:.1f} %,"
        f" and a step takes {_ms(unnamed.step)} ms."
    )


def not_counted(plan: Plan) -> str:
    """Return what the predicted times leave out, and what they rest on."""
    times = "of one core of a CPU, scaled by the memory's bandwidth"
    if plan.rates.measured:
        times = "of CPUs"
    gpu = f"Not predicted: any time on a GPU. Times of work are those {times}."
    if plan.topology == "parameter-server":
        gpu = f"Not counted: the server's own time.\n{gpu}"
    density = plan.workload.density
    if plan.workload.steps is not None or front_loaded(density, 0) == density:
        return gpu
    return (
        "Not counted: the first steps, in which sparse methods send more; --steps, the length of"
        f" the training, averages them in.\n{gpu}"
    )


def _flip(plan: Plan) -> str:
    stays = plan.advised is plan.best_dense
    if plan.flip_bytes_per_s is None:
        return f"{'Dense' if stays else 'This'} is the advice at any bandwidth, all else equal."
    at = bits(plan.flip_bytes_per_s)
    if stays:
        return f"Another would be worth it, {WORTH} times as fast, on links below {at}."
    return f"Dense would do on links above {at}."


def _told(row: PlannedStep) -> str:
    return (
        f"a step takes {_ms(row.step)} ms, {_ms(row.exposed)} ms of them beyond"
        f" the computation, and each rank sends {_mb(row)}"
    )


def _sends(row: PlannedStep) -> str:
    """Return the share of the gradient that a rank sends, and the format if it is not plain."""
    if row.method == POWERSGD:
        return "rank 4"
    share = "all" if row.density == 1 else f"{_short(100 * row.density)} %"
    return share if row.format == RAW else f"{share} {row.format.name}"


def _mb(row: PlannedStep) -> str:
    return f"{_short(row.bytes / 1e6)} MB"


def _ms(seconds: float) -> str:
    return _short(1000 * seconds)


def _short(number: float) -> str:
    """Return three digits, and more before the point where there are."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def bits(bytes_per_s: float) -> str:
    """Return a bandwidth as people state it."""
    rate, units = 8e-3 * bytes_per_s, ["kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]
    while rate >= 999.5 and len(units) > 1:
        rate, units = rate / 1000, units[1:]
    return f"{_short(rate)} {units[0]}"


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"
