"""Every scheme, and some on two levels, can be attached, trains, agrees and loses nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from sparcel.core.comm import Communicator
from sparcel.core.schemes import SCHEMES, GTopK, Hierarchical, OkTopK, ScaleCom
from tests.ddp.models import (
    LARGE,
    MANY_BUCKETS,
    Linear,
    Trained,
    assert_agreed,
    assert_conserved,
    gradient_sums,
    train,
)

pytestmark = pytest.mark.processes

SETTINGS: dict[str, dict[str, Any]] = {
    "hitopk": {"ranks_per_node": 2},
    "torus2d": {"ranks_per_node": 2},
    "dgc": {"density": 0.01, "momentum": 0.0},  # with momentum the velocity would enter the memory
}
"""Settings by scheme, in addition to the defaults."""

OTHERS: dict[str, dict[str, Any]] = {
    "oktopk, estimated": {"scheme": "oktopk", "threshold": "reuse", "threshold_steps": 2},
    "chunkwise": {"scheme": "topk", "selector": "chunkwise"},
    "random": {"scheme": "gtopk", "selector": "randomk"},
    "warm-up": {"scheme": "oktopk", "warmup": [1, 0.25], "warmup_steps": 1},
    "oktopk between nodes": {"scheme": Hierarchical(OkTopK(), 2)},
    "scalecom between nodes": {"scheme": Hierarchical(ScaleCom(), 2)},
    "one node": {"scheme": Hierarchical(GTopK(), 4)},
    "a node each": {"scheme": Hierarchical(GTopK(), 1)},
}

METHODS = {
    **{name: {"scheme": name, **SETTINGS.get(name, {})} for name in SCHEMES},
    **OTHERS,
}
DENSE = ("dense", "torus2d")
PRESETS = (
    *("mstopk", "dgc", "topk", "gtopk", "sparcml", "chunkwise", "random", "one node"),
    *("oktopk, estimated", "scalecom between nodes"),
)
"""What differs from others in nothing that DDP could see, or is in `tests.ddp.test_training`."""


@pytest.mark.parametrize("name", [name for name in METHODS if name not in PRESETS])
def test_ranks_agree_and_nothing_is_lost(run_on: Any, name: str) -> None:
    ranks = run_on(4, partial(train, wrap=MANY_BUCKETS, **METHODS[name]))
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(4, passes=4))
    for trained in ranks:
        assert trained.buckets == [1, 3, 3, 3]  # rebuilt after the first step
        assert trained.stats.steps == 4
        assert set(trained.residuals) == (set() if name in DENSE else set(LARGE))
    if name not in DENSE:
        assert any(owed.any() for trained in ranks for owed in trained.residuals.values())


UNUSED: dict[str, dict[int, list[str]]] = {
    "one": {3: ["second"]},
    "a node": {0: ["second"], 1: ["second", "first"]},
    "all": {rank: ["second", "norm"] for rank in range(4)},
}
TO_BE_UNUSED = [
    *("oktopk", "scalecom", "hitopk", "mstopk"),
    *("oktopk between nodes", "scalecom between nodes", "one node"),
]
IF_ONE_DOES = ("oktopk", "mstopk", "one node")
"""Whose steps differ in nothing that depends on how many ranks do not use a parameter."""


def train_unused(comm: Communicator, by: str) -> list[Trained]:
    wrap = {**MANY_BUCKETS, "find_unused_parameters": True}
    program = partial(train, comm, steps=6, wrap=wrap, unused=UNUSED[by], unused_in=[2, 3])
    names = [name for name in TO_BE_UNUSED if by == "one" or name not in IF_ONE_DOES]
    return [program(**METHODS[name]) for name in names]


@pytest.mark.parametrize("by", UNUSED)
def test_an_unused_parameter_neither_sends_nor_clears_memory(run_on: Any, by: str) -> None:
    gradients = gradient_sums(4, 6, unused=UNUSED[by], unused_in=[2, 3])
    for ranks in zip(*run_on(4, train_unused, by), strict=True):
        assert_agreed(list(ranks))
        assert_conserved(list(ranks), gradients)


def test_the_filter_conserves_memory_by_name(run_on: Any) -> None:
    filtered = {"beta": 0.5, "beta_steps": 2, "density": 0.05}
    for scheme in (ScaleCom(**filtered), Hierarchical(ScaleCom(**filtered), 2)):
        ranks = run_on(4, partial(train, scheme=scheme, steps=5, wrap=MANY_BUCKETS))
        assert_agreed(ranks)
        assert_conserved(ranks, gradient_sums(4, passes=5))  # β is 1 by then


def train_in_double(comm: Communicator, scheme: Any) -> Trained:
    model = {"dtypes": dict.fromkeys(("first", "second", "third"), torch.float64)}
    trained = train(comm, scheme, model=model, wrap=MANY_BUCKETS)
    assert all(owed.dtype == torch.float64 for owed in trained.residuals.values())
    return trained


@pytest.mark.parametrize("name", ["scalecom", "oktopk between nodes"])
def test_gradients_in_double_precision(run_on: Any, name: str) -> None:
    ranks = run_on(4, partial(train_in_double, scheme=METHODS[name]["scheme"]))
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(4, passes=4))


def bytes_in_a_step(comm: Communicator, name: str) -> list[int]:
    """Return the bytes that each of three steps sent, by the statistics."""
    return [
        train(
            comm, steps=steps, wrap=MANY_BUCKETS, frontload=False, **METHODS[name]
        ).stats.bytes_sent
        for steps in range(4)
    ]


@pytest.mark.parametrize("name", ["hitopk", "torus2d"])
def test_statistics_count_what_travels_in_nodes_and_between(run_on: Any, name: str) -> None:
    coordinates = sum(parameter.numel() for parameter in Linear().parameters())
    inside = 4 * coordinates // 2  # half of a rank's gradient is for the other rank of its node
    for sent in run_on(4, bytes_in_a_step, name):
        assert inside < sent[3] - sent[2] < (4 if name == "torus2d" else 1.2) * inside


IN_EVERY_PASS = ["oktopk", "scalecom", "hitopk", "oktopk between nodes", "warm-up"]


UNUSUAL: dict[str, dict[str, Any]] = {
    "static graph": {"wrap": {"static_graph": True}},
    "accumulated": {"micro_steps": 2},
    "accumulated in views": {"micro_steps": 2, "wrap": {"gradient_as_bucket_view": True}},
}


def train_in_unusual_passes(comm: Communicator, passes: str) -> list[Trained]:
    how = {**UNUSUAL[passes], "wrap": {**MANY_BUCKETS, **UNUSUAL[passes].get("wrap", {})}}
    return [train(comm, **how, **METHODS[name]) for name in IN_EVERY_PASS]


@pytest.mark.parametrize("passes", UNUSUAL)
def test_schemes_work_in_unusual_passes(run_on: Any, passes: str) -> None:
    count = 4 * UNUSUAL[passes].get("micro_steps", 1)
    for ranks in zip(*run_on(4, train_in_unusual_passes, passes), strict=True):
        assert_agreed(list(ranks))
        assert_conserved(list(ranks), gradient_sums(4, passes=count))
