"""Models that people train, and a step of training with one method, on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from torch import nn

from sparcel.core import units
from sparcel.core._checks import check_type, checked_number, checked_whole
from sparcel.core.auto import fastest_format
from sparcel.core.cost import STEPS, Problem, Rates, predict, work_seconds
from sparcel.core.cost.predict import Formula
from sparcel.core.cost.steps import ahead, engine_sum, on_nodes
from sparcel.core.formats import RAW, Format, format_named
from sparcel.core.schemes import DEFAULT, SEND_ALL, checked_density, front_loaded_shares
from sparcel.core.schemes.density import count_for
from sparcel.errors import checked_name


@dataclass(frozen=True)
class Model:
    """What of a model its exchange and its computation depend on.

    Attributes
    ----------
    parameters
        That are trained: coordinates of the gradient.
    flops
        Of a forward and a backward pass over one sample; 0 where unknown.
    kind
        ``"text"`` or ``"images"``: which recorded trainings are near.
    """

    name: str
    parameters: int
    flops: float = 0.0
    kind: str = "text"

    def __post_init__(self) -> None:
        checked_whole(self.parameters, "the parameters of a model to plan for", at_least=1)
        checked_number(self.flops, "flops", at_least=0)


def _vision(name: str, parameters: int, gigamacs: float) -> Model:
    """Return a model of images: a multiply-add is 2 FLOPs, a backward pass twice a forward one."""
    return Model(name, parameters, 6e9 * gigamacs, "images")


def _language(name: str, parameters: int, tokens: int) -> Model:
    """Return a model of texts: 6 FLOPs a parameter and token (Kaplan et al. 2020, section 2.1)."""
    return Model(name, parameters, 6.0 * parameters * tokens)


MODELS = {
    model.name: model
    for model in (
        # Parameters and multiply-adds at 224 x 224 as torchvision's documentation lists them.
        _vision("resnet18", 11_689_512, 1.81),
        _vision("resnet50", 25_557_032, 4.09),
        _vision("vgg16", 138_357_544, 15.47),
        _vision("vit-b16", 86_567_656, 17.56),
        # Devlin et al. 2018, section 3; sequences of 128, as 90 % of the pre-training has them.
        _language("bert-base", 110_000_000, 128),
        _language("bert-large", 340_000_000, 128),
        # The checkpoints of Radford et al. 2019, with tied embeddings.
        _language("gpt2", 124_439_808, 1024),
        _language("gpt2-xl", 1_557_611_200, 1024),
        # Touvron et al. 2023, table 2; "Llama 2", table 1: the same shapes, longer sequences.
        _language("llama-7b", 6_738_415_616, 2048),
        _language("llama-2-7b", 6_738_415_616, 4096),
        # The checkpoint's config.json: 16 layers of 2048, MLPs of 8192, keys and values of 512,
        # 128,256 tokens with tied embeddings; sequences as in Llama 3's pre-training.
        _language("llama-3.2-1b", 1_235_814_400, 8192),
    )
}
"""Models by name."""


def model_of(given: str | int | nn.Module) -> Model:
    """Return the model that a name, a number of parameters or a module stands for.

    Parameters
    ----------
    given
        One of `MODELS`; a number such as ``25_600_000``, ``"25.6M"`` or ``"7B"``, of a model of
        text; or a module, of which the parameters that are trained count, and which is of images
        where it has a convolution over two dimensions.

    Raises
    ------
    InputError
        When it is none of these, or has no parameters.
    """
    if isinstance(given, int):
        return Model(f"{given:,} parameters", given)
    if isinstance(given, str):
        if given.strip()[:1].isdigit():
            return Model(f"{given.strip()} parameters", units.whole(given))
        return MODELS[checked_name(given, MODELS, "model")]
    check_type(given, nn.Module, "model", "a name and a number of parameters are models, too")
    trained = sum(p.numel() for p in given.parameters() if p.requires_grad)
    kind = "images" if any(isinstance(one, nn.Conv2d) for one in given.modules()) else "text"
    return Model(type(given).__name__, trained, kind=kind)


BASELINE = "dense bf16"
DENSE: dict[str, Formula] = {"dense fp32": engine_sum(4), BASELINE: engine_sum(2)}
"""DDP's own all-reduce."""

_BACKWARD = 2 / 3
"""Share of the computation that is the backward pass, in which gradients become ready evenly."""


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
    """

    model: Model
    density: float
    compute_s: float
    bucket_bytes: int = 25 << 20
    format: Format | None = RAW
    steps: int | None = None
    every: int = 30

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


def mean_step(method: str, work: Workload, formula: Formula, rates: Rates) -> PlannedStep:
    """Return the mean of the training's steps, whose buckets are exchanged by a formula."""
    if sends_all(method):
        work = replace(work, density=1.0, format=RAW)
    steps = [
        (_step(method, work, density, formula, rates), share)
        for density, share in work.densities.items()
    ]
    means = {name: sum(share * getattr(step, name) for step, share in steps) for name in _MEANS}
    return replace(steps[-1][0], **means)


def _step(
    method: str, work: Workload, density: float, formula: Formula, rates: Rates
) -> PlannedStep:
    """Send the buckets one after the other, each once it is ready, with a step's density."""
    size = work.model.parameters
    buckets = ceil(4 * size / work.bucket_bytes)
    each = ceil(size / buckets)
    k, here = count_for(density, each), rates.ranks_per_node
    format = work.format or fastest_format(each, k, rates)
    problem = Problem(each, k, rates.ranks, here, format=format)
    bucket = predict(formula, problem, rates)
    # Step-ahead rests where memory holds roundings alone.
    moving = work_seconds(ahead(size), rates) if work.density < 1 else 0.0
    sent_until = 0.0
    for done in range(1, buckets + 1):
        ready = moving + work.compute_s * (1 - _BACKWARD * (1 - done / buckets))
        sent_until = max(ready, sent_until) + bucket.seconds
    return PlannedStep(
        method,
        density,
        format,
        step=sent_until,
        ahead=moving,
        select=buckets * bucket.select,
        pack=buckets * bucket.encode,
        exchange=buckets * bucket.exchange,
        reduce=buckets * bucket.reduce,
        exposed=sent_until - work.compute_s,
        bytes=buckets * bucket.bytes,
    )


OUTER = "outer's default"

_DENSE = "dense fp32", 1.0, RAW

_METHODS: dict[str, dict[tuple[str, float, Format], float]] = {
    # At each 16th outer step second moments are averaged, too.
    OUTER: {(DEFAULT, 1.0, format_named("packed:4")): 1.0, _DENSE: 1 / 16},
    "outer diloco": {_DENSE: 1.0},
    # 64 of 4096 coordinates, with values of 2 bits: Sarfi et al. 2025.
    "outer sparseloco": {(DEFAULT, 1 / 64, format_named("packed:2")): 1.0},
}
"""What is exchanged: by which scheme, at which density, in which format, and how often in an outer
step; first what is always."""

MOST_WAITING = 0.3
"""The share of a step that may be spent waiting for an exchange in every step. Outer steps are
advised beyond it; below it they make a step less than 1.5 times as fast."""

INTERVALS = (10, 30, 100)
"""Steps between outer steps that are advised."""

MOST_EXCHANGING = 0.15
"""The shortest interval is advised with which the exchange takes less of the time, or the last."""


def outer_steps(work: Workload, every: int, rates: Rates) -> tuple[PlannedStep, ...]:
    """Return steps with their shares of an outer step every so many, the fastest first.

    Nothing overlaps with the exchange of all parameters. Inside of machines, which are the islands,
    gradients are averaged in every step.
    """
    found = (_outer_step(name, work, every, rates) for name in _METHODS)
    return tuple(sorted(found, key=lambda row: row.step))


def outer_instead(fastest: PlannedStep, work: Workload, rates: Rates) -> PlannedStep | None:
    """Return the outer step to take if ``fastest``, with its exchange in every step, waits long."""
    if fastest.exposed <= MOST_WAITING * fastest.step:
        return None
    rows = [_outer_step(OUTER, work, every, rates) for every in INTERVALS]
    return next((row for row in rows if row.share < MOST_EXCHANGING), rows[-1])


def _outer_step(name: str, work: Workload, every: int, rates: Rates) -> PlannedStep:
    size, here, step, sent = work.model.parameters, rates.ranks_per_node, work.compute_s, 0.0
    if here > 1:
        averaged = mean_step("torus2d", work, STEPS["torus2d"], replace(rates, ranks=here))
        step, sent = averaged.step, averaged.bytes
    parts = dict.fromkeys(("select", "encode", "exchange", "reduce"), 0.0)
    for (scheme, density, format), share in _METHODS[name].items():
        formula = {**STEPS, **DENSE}[scheme]
        if here > 1:
            formula = partial(on_nodes, formula, scheme in DENSE)
        problem = Problem(size, count_for(density, size), rates.ranks, here, format=format)
        found = predict(formula, problem, rates)
        step, sent = step + found.seconds * share / every, sent + found.bytes * share / every
        for part in parts:
            parts[part] += getattr(found, part) * share / every
    _, density, format = next(iter(_METHODS[name]))
    select, pack, exchange, reduce = parts.values()
    seconds = step, 0.0, select, pack, exchange, reduce, step - work.compute_s
    return PlannedStep(name, density, format, *seconds, sent, every)
