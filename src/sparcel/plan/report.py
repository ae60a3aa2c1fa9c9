"""A plan as people read it: a table, and what it comes to."""

from __future__ import annotations

from statistics import mean

from rich.table import Table

from sparcel.formats import RAW
from sparcel.plan import recorded
from sparcel.plan.planner import BASELINE, WORTH, Plan, PlannedStep
from sparcel.plan.recorded import RECORDED
from sparcel.schemes import front_loaded


def table(plan: Plan) -> Table:
    """Return every method's step, the fastest first."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2))
    shown.add_column("method")
    for title in ("step", "exposed", "select", "pack", "exchange", "reduce"):
        shown.add_column(f"{title}\nms", justify="right")
    shown.add_column("sent\nMB", justify="right")
    shown.add_column("\n×", justify="right")
    shown.add_column("lost\npoints", justify="right")
    baseline = next(row for row in plan.rows if row.method == BASELINE)
    for row in plan.rows:
        parts = (row.select, row.pack, row.exchange, row.reduce)
        shown.add_row(
            row.method,
            *(_ms(seconds) for seconds in (row.step, row.exposed, *parts)),
            _short(row.bytes / 1e6),
            f"{baseline.step / row.step:.2f}",
            f"{-RECORDED[row.method].worst[0]:.1f}" if row.method in RECORDED else "",
        )
    return shown


LEGEND = (
    f"×: how many times as fast as {BASELINE}, overlapped. exposed: what the step takes beyond the"
    " computation, since buckets travel while the rest of the backward pass goes on. lost: points"
    " of accuracy below dense training in recorded trainings, on the worst of"
    f" {len(recorded.TASKS)} tasks, at {100 * recorded.DENSITY:g} %; lower densities may lose more."
)


def assumptions(plan: Plan) -> str:
    """Return what the plan is for, in a few lines."""
    work, rates = plan.workload, plan.rates
    nodes = rates.ranks // rates.ranks_per_node
    how = "measured" if rates.measured else "stated"
    said = f" ({rates.description})" if rates.description else ""
    layout = "" if work.format == RAW else f" as {work.format.name}"
    return (
        f"{work.model.name}: {work.model.parameters:,} gradients, {_ms(work.compute_s)} ms to"
        f" compute, {100 * work.density:g} % sent{layout}, in buckets of"
        f" {work.bucket_bytes / (1 << 20):g} MiB.\n"
        f"{nodes} {_plural('node', nodes)} of {rates.ranks_per_node}"
        f" {_plural('rank', rates.ranks_per_node)}, {bits(rates.bandwidth)} {how}{said};"
        f" {plan.topology}."
    )


def verdict(plan: Plan) -> str:
    """Return which method to use, with the numbers that decide."""
    dense, sparse = plan.best_dense, plan.best_sparse
    if plan.advised is dense:
        times = sparse.step / dense.step
        compared = f"{times:.2f} times as long" if times >= 1 else f"{1 / times:.2f} times as fast"
        first = (
            f"Stay dense: {_step(dense)}. The best sparse method, {sparse.method}, takes"
            f" {_ms(sparse.step)} ms for {_mb(sparse)}, {compared}: it selects, packs and adds up"
            f" for {_ms(sparse.select + sparse.pack + sparse.reduce)} ms."
        )
    else:
        first = (
            f"Use {sparse.method}: {_step(sparse)}. The best dense method, {dense.method}, takes"
            f" {_ms(dense.step)} ms for {_mb(dense)}, {dense.step / sparse.step:.1f} times as long."
        )
    caution = "" if plan.advised is dense else f"\n\n{_caution(sparse)}"
    return f"{first} {_flip(plan)}{caution}"


def _caution(row: PlannedStep) -> str:
    """Return what a method that keeps coordinates back lost in recorded trainings."""
    known = RECORDED[row.method]
    points, task = known.worst
    setting = f"{recorded.STEPS:,} steps at {100 * recorded.DENSITY:g} % on {recorded.RANKS} ranks"
    seeds = f"{known.seeds} {_plural('seed', known.seeds)}"
    return (
        f"{row.method} changes training: coordinates are applied later than in dense training. In"
        f" recorded trainings ({len(recorded.TASKS)} small tasks, {setting}, {seeds} each) it lost"
        f" {-points:.1f} points of accuracy on its worst task, {task}, and had"
        f" {known.perplexity:.1f} % more perplexity on words. Compare the accuracy with dense"
        " training."
    )


_TRAININGS = (120, 1_000, 10_000)
"""Steps of trainings for which a plan tells the mean density."""


def not_counted(plan: Plan) -> str:
    """Return what the predicted times leave out, and what they rest on."""
    times = "those of one core of a CPU, scaled by the memory's bandwidth"
    if plan.rates.measured:
        times = "those of CPUs"
    gpu = f"Not measured: any time on a GPU. The times to select, pack and reduce are {times}."
    density = plan.workload.density
    if front_loaded(density, 0) == density:
        return gpu
    means = (mean(front_loaded(density, step) for step in range(count)) for count in _TRAININGS)
    trainings = zip(_TRAININGS, means, strict=True)
    more = ", ".join(f"{_short(100 * share)} % in {count:,} steps" for count, share in trainings)
    return (
        "Not counted: front-loading. Unless it is switched off, sparse methods send more in the"
        " first steps of a training, which then take longer than the table says. The mean density"
        f" is {more}.\n{gpu}"
    )


def _flip(plan: Plan) -> str:
    stays = plan.advised is plan.best_dense
    if plan.flip_bytes_per_s is None:
        return f"{'Dense' if stays else 'Sparse'} is the advice at any bandwidth, all else equal."
    at = bits(plan.flip_bytes_per_s)
    if stays:
        return f"Sparse would be worth it, {WORTH} times as fast, on links below {at}."
    return f"Dense would do on links above {at}."


def _step(row: PlannedStep) -> str:
    return (
        f"with {row.method} a step takes {_ms(row.step)} ms, {_ms(row.exposed)} ms of them waiting"
        f" for {_mb(row)} a rank"
    )


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
