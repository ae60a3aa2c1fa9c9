"""What a step of training takes with every method, and which of them is the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from sparcel.core._checks import check_type
from sparcel.core.cost import STEPS, Problem, Rates, default_rates
from sparcel.core.cost.predict import Term
from sparcel.core.cost.steps import SERVED, on_nodes, powersgd
from sparcel.core.formats import RAW, Format, format_named
from sparcel.core.schemes import DEFAULT, ON_NODES
from sparcel.errors import InputError
from sparcel.tools.plan.recorded import BETWEEN, MUON, OWN, POWERSGD, own_settings, recorded
from sparcel.tools.plan.steps import (
    DENSE,
    Model,
    PlannedStep,
    Workload,
    mean_step,
    model_of,
    outer_instead,
    outer_steps,
    sends_all,
)

if TYPE_CHECKING:
    from torch import nn

SPARSE = ("topk", "gtopk", "oktopk", "scalecom")

WORTH = 1.1
"""How many times as fast, to the same loss, a method must be for a plan to advise it in place of
one that loses less: predictions are not better than that."""

MOST_RANKS = 512
"""How many ranks a plan is for at most: a ring's formula has a term for each step."""

FEWEST_SEEDS = 3
"""Of fewer trainings a plan advises no method, if it can advise another."""

_FLIP_FACTORS = (1e-4, 1e4)


@dataclass(frozen=True)
class Plan:
    """Every method's step, that first which is the fastest to the loss of dense training.

    The advice is the fastest dense method, unless the best of the others is `WORTH` times as fast,
    and outer steps, where even the fastest of these waits for more than 30 % of a step.

    Attributes
    ----------
    rows
        Methods that exchange in every step.
    flip_bytes_per_s
        The bandwidth of a node's link at which the advice changes, all else equal; None where
        none from a ten thousandth to ten thousand times as much changes it.
    kind
        The kind of recorded trainings that tell how many steps methods need: ``"text"``,
        ``"images"`` or ``"Muon"``.
    outer
        Outer steps every ``workload.every`` steps, between several machines without a server.
    instead
        The outer step to take instead of `advised`, with an interval of 10, 30 or 100 steps; None
        where `advised` does.
    """

    workload: Workload
    rates: Rates
    rows: tuple[PlannedStep, ...]
    flip_bytes_per_s: float | None
    topology: str
    kind: str
    outer: tuple[PlannedStep, ...] = ()
    instead: PlannedStep | None = None

    @property
    def fastest(self) -> PlannedStep:
        """The fastest of the methods that may be advised."""
        return min(_best(self.rows)[0], _known(self.rows)[0], key=lambda row: row.to_loss)

    @property
    def advised(self) -> PlannedStep:
        """The method to use, of those that exchange in every step."""
        return _advised(self.rows)

    @property
    def best_dense(self) -> PlannedStep:
        """The fastest of the methods that send everything."""
        return _best(self.rows)[0]

    @property
    def best_sparse(self) -> PlannedStep:
        """The method to use if not a dense one: of those that are known by `FEWEST_SEEDS`
        trainings, the one that loses least and is not `WORTH` times as slow as the fastest.
        """
        return _best(self.rows)[1]


def _best(rows: Sequence[PlannedStep]) -> tuple[PlannedStep, PlannedStep]:
    """Return the best dense and the best sparse method of sorted rows."""
    dense = next(row for row in rows if sends_all(row.method))
    known = _known(rows)
    most = WORTH * known[0].to_loss
    near = {row.method: row for row in known if row.to_loss <= most}
    preferred = (near[name] for own in OWN for name in (own, own + BETWEEN) if name in near)
    return dense, next(preferred, known[0])


def _known(rows: Sequence[PlannedStep]) -> Sequence[PlannedStep]:
    """Return the methods that are not dense, and are known by enough trainings if any are."""
    sparse = [row for row in rows if not sends_all(row.method)]
    return [row for row in sparse if row.seeds >= FEWEST_SEEDS] or sparse


def _advised(rows: Sequence[PlannedStep]) -> PlannedStep:
    dense, sparse = _best(rows)
    return sparse if WORTH * sparse.to_loss < dense.to_loss else dense


def plan(
    model: str | int | Model | nn.Module,
    *,
    compute_s: float,
    density: float = 0.01,
    rates: Rates | None = None,
    bucket_bytes: int = 25 << 20,
    topology: str = "all-reduce",
    format: str | Format = "raw",
    steps: int | None = None,
    every: int = 30,
    muon: bool = False,
) -> Plan:
    """Return what a step of training takes with every method.

    Parameters
    ----------
    model
        A name of `sparcel.plan.MODELS`, a number of parameters, a `Model`, or the module itself.
    compute_s
        Seconds that a forward and a backward pass take on a rank.
    density
        Share of the coordinates that a rank sends.
    rates
        What the cluster is good for: of `sparcel.cost.measure`, `sparcel.cost.stated_rates`, or
        None for the default ones.
    bucket_bytes
        Of the float32 gradients that travel together.
    topology
        ``"all-reduce"``, or ``"parameter-server"``: each rank sends to one server, and gets the sum
        from it, over a link that it shares with the ranks of its node alone. The server takes no
        time, as in ScaleCom's appendix F.
    format
        How the streams of sparse methods travel, by name or as a `Format`; ``"auto"`` for the exact
        one that takes the least time.
    steps
        The length of the training, over which times are averaged: sparse methods send more in its
        first steps. None for those of a step after these.
    every
        How many steps machines train apart before an outer step.
    muon
        Whether Muon trains, for which `attach` chooses another default, and other trainings tell
        how many steps a method needs.

    What `attach` does without a name is planned, too, and at 10 %, whatever the density and format
    of the others; so is torch's PowerSGD hook with matrices of rank 4. Step-ahead comes before the
    forward pass. Gradients are assumed to become ready evenly in the last two thirds of the
    computation, and the ranks' indices to be independent: the most fill-in that there can be.

    Raises
    ------
    InputError
        When the model or the topology is not known, there are more than `MOST_RANKS` ranks, or a
        number is out of its range.
    """
    rates = default_rates() if rates is None else rates
    check_type(rates, Rates, "rates")
    if rates.ranks > MOST_RANKS:
        raise InputError(f"a plan is for at most {MOST_RANKS} ranks, got {rates.ranks:,}")
    trained = model if isinstance(model, Model) else model_of(model)
    layout = None if format == "auto" else format_named(format)
    work = Workload(trained, density, compute_s, bucket_bytes, layout, steps, every)
    if topology not in ("all-reduce", "parameter-server"):
        raise InputError(f"topology must be all-reduce or parameter-server, got {topology!r}")

    kind = MUON if muon else trained.kind
    rows = partial(_rows, work, topology, kind)
    found = rows(rates)
    islands = topology == "all-reduce" and rates.ranks > rates.ranks_per_node
    outer = outer_steps(work, every, rates) if islands else ()
    made = Plan(work, rates, found, _flip(rows, rates), topology, kind, outer)
    return replace(made, instead=outer_instead(made.fastest, work, rates)) if islands else made


def _rows(work: Workload, topology: str, kind: str, rates: Rates) -> tuple[PlannedStep, ...]:
    """Return the steps of all methods, that first which is the fastest to the loss."""
    if topology == "parameter-server":
        found = [mean_step(name, work, formula, rates) for name, formula in SERVED.items()]
    else:
        found = _all_reduced(work, kind, rates)
    told = (
        replace(row, factor=known.factor(kind), seeds=known.seeds_of(kind))
        if (known := recorded(row.method, work.density, row.format, kind))
        else row
        for row in found
    )
    return tuple(sorted(told, key=lambda row: row.to_loss))


def _all_reduced(work: Workload, kind: str, rates: Rates) -> list[PlannedStep]:
    nodes = ON_NODES if 1 < rates.ranks_per_node < rates.ranks else ()
    formulas = DENSE | {name: partial(_selecting, name) for name in SPARSE}
    formulas |= {name: STEPS[name] for name in nodes}
    found = [mean_step(name, work, formula, rates) for name, formula in formulas.items()]
    between = partial(on_nodes, STEPS[DEFAULT], False)
    for name, sent in own_settings(kind).items():
        own = replace(work, density=sent["density"], format=format_named(sent["format"]))
        found.append(mean_step(name, own, STEPS[DEFAULT], rates))
        if nodes:
            found.append(mean_step(name + BETWEEN, own, between, rates))
    everything = replace(work, density=1.0, format=RAW)
    low_rank = partial(powersgd, work.model.parameters)
    return [*found, mean_step(POWERSGD, everything, low_rank, rates)]


def _selecting(method: str, problem: Problem) -> Iterable[Term]:
    """Return the terms of a method that selects.

    A step that sends everything is an exchange by regions, or without rounding a sum.
    """
    if problem.k == problem.size:
        method = DEFAULT if problem.format.loses else "topk"
    return STEPS[method](problem)


def _flip(rows: Callable[[Rates], Sequence[PlannedStep]], rates: Rates) -> float | None:
    """Return the bandwidth at which the advice changes, by bisection."""

    def dense_wins(factor: float) -> bool:
        return sends_all(_advised(rows(rates.slower(factor))).method)

    fast, slow = _FLIP_FACTORS
    if not dense_wins(fast) or dense_wins(slow):
        return None
    while slow / fast > 1.001:
        middle = (fast * slow) ** 0.5
        fast, slow = (middle, slow) if dense_wins(middle) else (fast, middle)
    return rates.bandwidth / fast
