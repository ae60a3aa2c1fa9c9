"""A step of training with one method, on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from sparcel._checks import checked_number, checked_whole
from sparcel.auto import fastest_format
from sparcel.cost import Prediction, Problem, Rates, work_seconds
from sparcel.formats import RAW, Format
from sparcel.plan.models import Model
from sparcel.schemes import SEND_ALL, checked_density, engine_stages, front_loaded_shares
from sparcel.schemes.density import count_for
from sparcel.stages import Stages
from sparcel.training.ahead import ahead_work

BASELINE = "dense bf16"
DENSE: dict[str, Stages] = {"dense fp32": engine_stages(4), BASELINE: engine_stages(2)}
"""DDP's own all-reduce."""

_BACKWARD = 2 / 3
"""Share of the computation that is the backward pass, in which gradients become ready evenly."""

Predict = Callable[[Problem], Prediction]


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
        How the streams of sparse methods travel; None for the exact one that takes the least time.
    steps
        The length of the training, in whose first steps sparse methods send more. None: a step
        after these.
    every
        The steps that machines train apart before an outer step.
    answer
        How what the owners of regions return travels; None for as what they are sent.
    """

    model: Model
    density: float
    compute_s: float
    bucket_bytes: int = 25 << 20
    format: Format | None = RAW
    steps: int | None = None
    every: int = 30
    answer: Format | None = None

    def __post_init__(self) -> None:
        checked_density(self.density)
        checked_number(self.compute_s, "compute_s", at_least=0)
        checked_whole(self.bucket_bytes, "bucket_bytes", at_least=4)
        if self.steps is not None:
            checked_whole(self.steps, "steps", at_least=1)
        checked_whole(self.every, "every", at_least=1)

    @property
    def densities(self) -> dict[float, float]:
        """The densities of the steps, each with its share of them."""
        if self.steps is None:
            return {self.density: 1.0}
        return front_loaded_shares(self.density, self.steps)


@dataclass(frozen=True)
class PlannedStep:
    """A step with one method, in the mean over the training; seconds.

    ``select``, ``pack`` (into messages and out of them), ``exchange`` and ``reduce`` are those of
    all buckets, ``ahead`` is what step-ahead adds to the forward pass, ``step`` what passes from
    one step to the next, and ``exposed`` what it takes beyond the computation. ``bytes`` are a
    rank's, ``density`` and ``format`` what it sends. Of an exchange ``every`` so many steps, times
    and bytes are a step's share. ``factor`` is how many times dense training's steps it needs for
    the same loss; None where that was not recorded. ``seeds`` is how many trainings there are on
    each task that counts.
    """

    method: str
    density: float
    format: Format
    step: float
    ahead: float
    select: float
    pack: float
    exchange: float
    reduce: float
    exposed: float
    bytes: float
    every: int = 1
    factor: float | None = None
    seeds: int = 0

    @property
    def to_loss(self) -> float:
        """The time that brings training as far as a step of dense training does, at least."""
        return self.step * (self.factor or 1)

    @property
    def work(self) -> float:
        """What ranks compute for the exchange."""
        return self.select + self.pack + self.reduce

    @property
    def share(self) -> float:
        """Which share of the step the work and the exchange take."""
        return (self.work + self.exchange) / self.step


def sends_all(method: str) -> bool:
    """Tell whether a method sends everything."""
    return method in (*DENSE, *SEND_ALL)


_MEANS = ("density", "step", "ahead", "select", "pack", "exchange", "reduce", "exposed", "bytes")


def mean_step(method: str, work: Workload, predicted: Predict, rates: Rates) -> PlannedStep:
    """Return the mean of the training's steps, where a bucket's exchange is as ``predicted``."""
    if sends_all(method):
        work = replace(work, density=1.0, format=RAW)
    steps = [
        (_step(method, work, density, predicted, rates), share)
        for density, share in work.densities.items()
    ]
    means = {name: sum(share * getattr(step, name) for step, share in steps) for name in _MEANS}
    return replace(steps[-1][0], **means)


def _step(
    method: str, work: Workload, density: float, predicted: Predict, rates: Rates
) -> PlannedStep:
    """Send the buckets one after the other, each once it is ready, with a step's density."""
    size = work.model.parameters
    buckets = ceil(4 * size / work.bucket_bytes)
    each = ceil(size / buckets)
    k, here = count_for(density, each), rates.ranks_per_node
    format = work.format or fastest_format(each, k, rates)
    bucket = predicted(Problem(each, k, rates.ranks, here, format=format, answer=work.answer))
    # Step-ahead rests where memory holds roundings alone.
    ahead = work_seconds(ahead_work(size), rates) if work.density < 1 else 0.0
    sent_until = 0.0
    for done in range(1, buckets + 1):
        ready = ahead + work.compute_s * (1 - _BACKWARD * (1 - done / buckets))
        sent_until = max(ready, sent_until) + bucket.seconds
    return PlannedStep(
        method,
        density,
        format,
        step=sent_until,
        ahead=ahead,
        select=buckets * bucket.select,
        pack=buckets * bucket.encode,
        exchange=buckets * bucket.exchange,
        reduce=buckets * bucket.reduce,
        exposed=sent_until - work.compute_s,
        bytes=buckets * bucket.bytes,
    )
