"""What a step of training takes with every method, and which of them is the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from sparcel._checks import check_type, number, whole_number
from sparcel.cost import Prediction, Problem, Rates, default_rates, predict
from sparcel.errors import InputError
from sparcel.formats import RAW, Format, format_named
from sparcel.plan.models import Model, model_of
from sparcel.plan.server import through_server
from sparcel.schemes import ON_NODES, SEND_ALL, checked_density, engine_stages, stages_of
from sparcel.stages import Stages

if TYPE_CHECKING:
    from torch import nn

BASELINE = "dense bf16"
DENSE: dict[str, Stages] = {"dense fp32": engine_stages(4), BASELINE: engine_stages(2)}
"""DDP's own all-reduce."""

SPARSE = ("topk", "gtopk", "oktopk", "scalecom")

_BACKWARD = 2 / 3
"""Share of the computation that is the backward pass, in which gradients become ready evenly."""

WORTH = 1.1
"""How many times as fast sparse must be for a plan to advise it: predictions are not better than
that, and error feedback is one thing more that may go wrong."""

MOST_RANKS = 512
"""How many ranks a plan is for at most: it lists what a rank exchanges with every other one, which
takes about a second then."""

_FLIP_FACTORS = (1e-4, 1e4)


@dataclass(frozen=True)
class Workload:
    """What is trained, and how it is exchanged.

    Attributes
    ----------
    compute_s
        Seconds of a forward and a backward pass.
    bucket_bytes
        Gradients (float32) travel in buckets of so many bytes, in order, each as soon as it is
        ready and the one before has arrived. DDP's default is 25 MiB.
    format
        How the streams of sparse methods travel.
    """

    model: Model
    density: float
    compute_s: float
    bucket_bytes: int = 25 << 20
    format: Format = RAW

    def __post_init__(self) -> None:
        checked_density(self.density)
        number(self.compute_s, "compute_s", at_least=0)
        whole_number(self.bucket_bytes, "bucket_bytes", at_least=4)


@dataclass(frozen=True)
class PlannedStep:
    """A step with one method; seconds.

    ``select``, ``pack`` (into messages and out of them), ``exchange`` and ``reduce`` are those of
    all buckets, ``step`` what passes from one step to the next, and ``exposed`` the part of it in
    which nothing is computed. ``bytes`` are a rank's.
    """

    method: str
    step: float
    select: float
    pack: float
    exchange: float
    reduce: float
    exposed: float
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Every method's step, the fastest first.

    The advice is the fastest dense method, unless a sparse one is `WORTH` as many times as fast.

    Attributes
    ----------
    flip_bytes_per_s
        The bandwidth of a node's link at which the advice changes, all else equal; None where
        none from a ten thousandth to ten thousand times as much changes it.
    """

    workload: Workload
    rates: Rates
    rows: tuple[PlannedStep, ...]
    flip_bytes_per_s: float | None
    topology: str

    @property
    def advised(self) -> PlannedStep:
        """The method to use."""
        return _advised(self.rows)

    @property
    def best_dense(self) -> PlannedStep:
        """The fastest of the methods that send everything."""
        return _best(self.rows)[0]

    @property
    def best_sparse(self) -> PlannedStep:
        """The fastest of the others."""
        return _best(self.rows)[1]


def is_dense(method: str) -> bool:
    """Tell whether a method sends everything."""
    return method in (*DENSE, *SEND_ALL)


def _best(rows: Sequence[PlannedStep]) -> tuple[PlannedStep, PlannedStep]:
    """Return the fastest dense and the fastest sparse method of sorted rows."""
    dense = next(row for row in rows if is_dense(row.method))
    return dense, next(row for row in rows if not is_dense(row.method))


def _advised(rows: Sequence[PlannedStep]) -> PlannedStep:
    dense, sparse = _best(rows)
    return sparse if WORTH * sparse.step < dense.step else dense


def plan(
    model: str | int | Model | nn.Module,
    *,
    compute_s: float,
    density: float = 0.01,
    rates: Rates | None = None,
    bucket_bytes: int = 25 << 20,
    topology: str = "all-reduce",
    format: str | Format = "raw",
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
        ``"all-reduce"``, or ``"parameter-server"``: all ranks send to one, and get from it.
    format
        How the streams of sparse methods travel, by name or as a `Format`.

    Gradients are assumed to become ready evenly in the last two thirds of the computation, and the
    ranks' indices to be independent: the most fill-in that there can be.

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
    work = Workload(trained, density, compute_s, bucket_bytes, format_named(format))
    if topology not in ("all-reduce", "parameter-server"):
        raise InputError(f"topology must be all-reduce or parameter-server, got {topology!r}")

    def rows(rates: Rates) -> tuple[PlannedStep, ...]:
        nodes = ON_NODES if 1 < rates.ranks_per_node < rates.ranks else ()
        if topology == "parameter-server":
            found = [_row(name, work, through_server(name, rates), rates) for name in _SERVED]
        else:
            methods = (*DENSE, *SPARSE, *nodes)
            found = [_row(name, work, _in_ring(name, rates), rates) for name in methods]
        return tuple(sorted(found, key=lambda row: row.step))

    return Plan(work, rates, rows(rates), _flip(rows, rates), topology)


_SERVED = (*DENSE, "topk", "scalecom")

Predict = Callable[[Problem], Prediction]


def _in_ring(method: str, rates: Rates) -> Predict:
    stages = DENSE[method] if method in DENSE else stages_of(method, rates)
    return lambda problem: predict(stages, problem, rates)


def _row(method: str, work: Workload, predicted: Predict, rates: Rates) -> PlannedStep:
    """Send the buckets one after the other, each once it is ready."""
    size = work.model.parameters
    buckets = ceil(4 * size / work.bucket_bytes)
    problem = _problem(ceil(size / buckets), work, rates)
    bucket = predicted(problem)
    sent_until = 0.0
    for done in range(1, buckets + 1):
        ready = work.compute_s * (1 - _BACKWARD * (1 - done / buckets))
        sent_until = max(ready, sent_until) + bucket.seconds
    return PlannedStep(
        method,
        step=sent_until,
        select=buckets * bucket.select,
        pack=buckets * bucket.encode,
        exchange=buckets * bucket.exchange,
        reduce=buckets * bucket.reduce,
        exposed=sent_until - work.compute_s,
        bytes=buckets * bucket.bytes,
    )


def _problem(size: int, work: Workload, rates: Rates) -> Problem:
    k = max(1, ceil(work.density * size))
    return Problem(size, k, rates.ranks, rates.ranks_per_node, format=work.format)


def _flip(rows: Callable[[Rates], Sequence[PlannedStep]], rates: Rates) -> float | None:
    """Return the bandwidth at which the advice changes, by bisection."""

    def dense_wins(factor: float) -> bool:
        return is_dense(_advised(rows(rates.slower(factor))).method)

    fast, slow = _FLIP_FACTORS
    if not dense_wins(fast) or dense_wins(slow):
        return None
    while slow / fast > 1.001:
        middle = (fast * slow) ** 0.5
        fast, slow = (middle, slow) if dense_wins(middle) else (fast, middle)
    return rates.bandwidth / fast
