"""The gradients after a step: agreement, conservation, and equality with plain DDP."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.errors import SparcelWarning
from tests.ddp.models import (
    LARGE,
    MANY_BUCKETS,
    SHAPES,
    Linear,
    Trained,
    assert_agreed,
    assert_conserved,
    gradient_sums,
    train,
)
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes


def assert_same_updates(ranks: list[Trained], expected: list[Trained]) -> None:
    for mine, theirs in zip(ranks, expected, strict=True):
        for update, reference in zip(mine.every_update, theirs.every_update, strict=True):
            assert update.keys() == reference.keys()
            for name in update:
                assert torch.equal(update[name], reference[name]), name


@pytest.mark.parametrize(
    ("world_size", "scheme", "wrap"),
    [
        (2, "topk", {}),
        (4, "topk", MANY_BUCKETS),
        (2, "sparcml", MANY_BUCKETS),
        (4, "gtopk", MANY_BUCKETS),
    ],
)
def test_ranks_agree_and_nothing_is_lost(
    run_on: Any, world_size: int, scheme: str, wrap: dict[str, Any]
) -> None:
    ranks = run_on(world_size, partial(train, scheme=scheme, wrap=wrap))
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(world_size, passes=4))
    for trained in ranks:
        assert set(trained.residuals) == set(LARGE)
        assert any(owed.any() for owed in trained.residuals.values())
        # DDP starts with one bucket, and rebuilds its buckets after the first step.
        assert trained.buckets == ([1, 3, 3, 3] if wrap else [1, 1, 1, 1])


def test_quantised_updates_agree_and_nothing_is_lost(run_on: Any) -> None:
    program = partial(train, scheme="sparcml", density=0.5, bits=4, wrap=MANY_BUCKETS)
    ranks = run_on(4, program)
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(4, passes=4), exact=False)


@pytest.mark.parametrize(
    ("world_size", "wrap"), [(2, {}), (4, MANY_BUCKETS)], ids=["one bucket", "many buckets"]
)
def test_density_one_equals_plain_ddp(run_on: Any, world_size: int, wrap: dict[str, Any]) -> None:
    plain = run_on(world_size, partial(train, scheme=None, wrap=wrap))
    for settings in {"scheme": "dense"}, {"scheme": "topk", "density": 1.0}:
        ranks = run_on(world_size, partial(train, wrap=wrap, **settings))
        assert_same_updates(ranks, plain)
        assert not any(owed.any() for trained in ranks for owed in trained.residuals.values())


def test_a_half_precision_wire_is_exact_for_small_integers(run_on: Any) -> None:
    plain = run_on(4, partial(train, scheme=None))
    assert_same_updates(run_on(4, partial(train, scheme="dense", wire="bfloat16")), plain)


def test_accumulated_gradients(run_on: Any) -> None:
    wrap = {**MANY_BUCKETS, "gradient_as_bucket_view": True}
    accumulate = partial(train, steps=2, micro_steps=3, wrap=wrap)
    plain = run_on(2, partial(accumulate, scheme=None))
    assert_same_updates(run_on(2, partial(accumulate, scheme="topk", density=1.0)), plain)
    ranks = run_on(2, partial(accumulate, scheme="topk"))
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(2, passes=6))
    assert all(trained.stats.steps == 2 for trained in ranks)


BY_ONE = {0: ["second"]}
BY_ALL = {0: ["second", "norm"], 1: ["second", "norm"]}


@pytest.mark.parametrize(
    ("unused", "unused_in", "view"),
    [
        (BY_ONE, range(9), False),
        (BY_ONE, [2, 3], True),
        (BY_ALL, range(9), True),
        (BY_ALL, [2, 3], False),
    ],
)
def test_unused_parameters(
    run_on: Any, unused: dict[int, list[str]], unused_in: Any, view: bool
) -> None:
    wrap = {**MANY_BUCKETS, "find_unused_parameters": True, "gradient_as_bucket_view": view}
    program = partial(train, steps=6, wrap=wrap, unused=unused, unused_in=unused_in)
    plain = run_on(2, partial(program, scheme=None))
    assert_same_updates(run_on(2, partial(program, scheme="topk", density=1.0)), plain)
    ranks = run_on(2, partial(program, scheme="topk"))
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(2, 6, unused=unused, unused_in=unused_in))


def test_unused_parameters_of_a_static_graph(run_on: Any) -> None:
    wrap = {**MANY_BUCKETS, "static_graph": True, "gradient_as_bucket_view": True}
    program = partial(train, wrap=wrap, unused=BY_ALL)
    plain = run_on(2, partial(program, scheme=None))
    assert_same_updates(run_on(2, partial(program, scheme="topk", density=1.0)), plain)
    ranks = run_on(2, partial(program, scheme="topk"))
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(2, passes=4, unused=BY_ALL))


def test_static_graph(run_on: Any) -> None:
    program = partial(train, wrap={**MANY_BUCKETS, "static_graph": True})
    plain = run_on(4, partial(program, scheme=None))
    assert_same_updates(run_on(4, partial(program, scheme="topk", density=1.0)), plain)
    ranks = run_on(4, partial(program, scheme="topk"))
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(4, passes=4))
    assert ranks[0].buckets[-1] == 3


def test_frozen_parameters(run_on: Any) -> None:
    model = {"frozen": ["second", "bias"]}
    ranks = run_on(2, partial(train, scheme="topk", model=model, wrap=MANY_BUCKETS))
    assert_agreed(ranks)
    gradients = gradient_sums(2, passes=4)
    assert_conserved(ranks, {name: gradients[name] for name in ("first", "third", "norm")})
    assert all(set(trained.residuals) == {"first", "third"} for trained in ranks)
    assert all("second" not in trained.updates for trained in ranks)


@pytest.mark.parametrize(
    "wrap",
    [MANY_BUCKETS, {**MANY_BUCKETS, "static_graph": True}],
    ids=["many buckets", "static graph"],
)
def test_several_dtypes_in_one_model(run_on: Any, wrap: dict[str, Any]) -> None:
    model = {
        "dtypes": {
            "first": torch.bfloat16,
            "bias": torch.bfloat16,
            "second": torch.float64,
            "norm": torch.float64,
        }
    }
    program = partial(train, steps=3, model=model, wrap=wrap)
    plain = run_on(4, partial(program, scheme=None))
    assert_same_updates(run_on(4, partial(program, scheme="topk", density=1.0)), plain)
    ranks = run_on(4, partial(program, scheme="topk"))
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(4, passes=3, model=model))


def train_alone(comm: Communicator) -> Trained:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach_evenly(DistributedDataParallel(Linear()), "dense").close()
    with pytest.warns(SparcelWarning, match="there is only one replica"):
        return train(comm, "topk", wrap=MANY_BUCKETS)


def test_one_rank_alone_is_warned(run_on: Any) -> None:
    ranks = run_on(1, train_alone)
    assert_conserved(ranks, gradient_sums(1, passes=4))


def test_only_small_tensors(run_on: Any) -> None:
    model = {"shapes": {"bias": (40,), "matrix": (8, 8), "norm": (50,)}}
    plain = run_on(4, partial(train, scheme=None, model=model))
    ranks = run_on(4, partial(train, scheme="topk", model=model))
    assert_same_updates(ranks, plain)
    assert all(trained.residuals == {} for trained in ranks)
    assert all(trained.stats.steps == 4 for trained in ranks)


def test_a_bucket_with_only_small_tensors(run_on: Any) -> None:
    shapes = {"bias": (900,), "first": (40, 64), "norm": (900,), "second": (30, 100)}
    program = partial(train, scheme="topk", model={"shapes": shapes}, wrap={"bucket_cap_mb": 0.003})
    ranks = run_on(2, program)
    assert ranks[0].buckets[-1] == 4
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(2, passes=4, model={"shapes": shapes}))


def test_small_tensors_take_one_message_a_step(run_on: Any) -> None:
    large_only = {"shapes": {name: SHAPES[name] for name in LARGE}}
    with_small = run_on(2, partial(train, scheme="topk", steps=5, wrap=MANY_BUCKETS))
    without = run_on(2, partial(train, scheme="topk", steps=5, wrap=MANY_BUCKETS, model=large_only))
    for mine, theirs in zip(with_small, without, strict=True):
        assert mine.buckets == theirs.buckets
        assert mine.stats.messages_sent == sum(mine.buckets) + 5
        assert theirs.stats.messages_sent == sum(theirs.buckets)


def keep_only_second(name: str, parameter: torch.Tensor) -> bool:
    return name != "second"


def test_the_policy_decides_which_tensors_stay_dense(run_on: Any) -> None:
    plain = run_on(2, partial(train, scheme=None))
    ranks = run_on(2, partial(train, scheme="topk", policy=keep_only_second))
    assert all(set(trained.residuals) == {"second"} for trained in ranks)
    assert_conserved(ranks, gradient_sums(2, passes=4))
    for name in ("first", "third", "bias", "norm"):
        assert torch.equal(ranks[0].updates[name], plain[0].updates[name])
    assert not torch.equal(ranks[0].updates["second"], plain[0].updates["second"])
