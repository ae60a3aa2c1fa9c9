"""Outer steps: machines train apart for some steps, then exchange what their parameters moved."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sparcel.cost import Problem, Rates, predict
from sparcel.formats import RAW, Format, format_named
from sparcel.plan.steps import DENSE, PlannedStep, Workload, mean_step
from sparcel.schemes import DEFAULT, stages_of
from sparcel.schemes.density import count_for
from sparcel.schemes.hierarchical import stages_on_nodes

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
        inside = partial(predict, stages_of("torus2d", rates), rates=rates)
        averaged = mean_step("torus2d", work, inside, replace(rates, ranks=here))
        step, sent = averaged.step, averaged.bytes
    parts = dict.fromkeys(("select", "encode", "exchange", "reduce"), 0.0)
    for (scheme, density, format), share in _METHODS[name].items():
        stages = DENSE[scheme] if scheme in DENSE else stages_of(scheme, rates)
        if here > 1:
            stages = partial(stages_on_nodes, stages, scheme in DENSE)
        problem = Problem(size, count_for(density, size), rates.ranks, here, format=format)
        found = predict(stages, problem, rates)
        step, sent = step + found.seconds * share / every, sent + found.bytes * share / every
        for part in parts:
            parts[part] += getattr(found, part) * share / every
    _, density, format = next(iter(_METHODS[name]))
    select, pack, exchange, reduce = parts.values()
    seconds = step, 0.0, select, pack, exchange, reduce, step - work.compute_s
    return PlannedStep(name, density, format, *seconds, sent, every)
