"""One selection over the whole model, whatever buckets DDP makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparcel.core.comm import Communicator
from sparcel.core.schemes import GTopK, Hierarchical, OkTopK
from tests.ddp.models import (
    LARGE,
    MANY_BUCKETS,
    Trained,
    assert_agreed,
    assert_conserved,
    gradient_sums,
    train,
)

pytestmark = pytest.mark.processes

SCHEMES = ("topk", "scalecom", GTopK(0.02), Hierarchical(OkTopK(0.05), 2))

Seen = dict[str, Trained]


def train_in_each_way(comm: Communicator) -> list[Seen]:
    """Train with few buckets and with many, each scheme over the whole model and by bucket."""
    seen = []
    for scheme in SCHEMES:
        by_bucket = train(comm, scheme)
        one = train(comm, scheme, scope="model")
        several = train(comm, scheme, scope="model", wrap=MANY_BUCKETS)
        seen.append({"by bucket": by_bucket, "one": one, "several": several})
    return seen


def assert_same(mine: Trained, theirs: Trained) -> None:
    for update, expected in zip(mine.every_update, theirs.every_update, strict=True):
        assert all(torch.equal(update[name], expected[name]) for name in expected)
    assert all(torch.equal(mine.residuals[name], theirs.residuals[name]) for name in LARGE)


def test_one_bucket_and_several_have_the_updates_of_one_vector(run_on: Any) -> None:
    for ranks in zip(*run_on(4, train_in_each_way), strict=True):
        for seen in ranks:
            assert seen["several"].buckets == [1, 3, 3, 3]  # rebuilt after the first step
            assert_same(seen["one"], seen["by bucket"])
            assert_same(seen["several"], seen["by bucket"])
            sent = {way: trained.stats.messages_sent for way, trained in seen.items()}
            assert sent["several"] == sent["by bucket"]
        assert_agreed([seen["several"] for seen in ranks])


UNUSUAL: dict[str, dict[str, Any]] = {
    "static graph": {"wrap": {"static_graph": True}},
    "accumulated in views": {"micro_steps": 2, "wrap": {"gradient_as_bucket_view": True}},
    "several dtypes": {"model": {"dtypes": {"bias": torch.bfloat16, "second": torch.float64}}},
    "unused": {
        "wrap": {"find_unused_parameters": True},
        "unused": {0: ["second", "norm"], 1: ["second", "norm"]},
    },
}


def train_in_unusual_passes(comm: Communicator) -> list[Trained]:
    wraps = [{**MANY_BUCKETS, **how.get("wrap", {})} for how in UNUSUAL.values()]
    return [
        train(comm, "topk", scope="model", **{**how, "wrap": wrap})
        for how, wrap in zip(UNUSUAL.values(), wraps, strict=True)
    ]


def test_nothing_is_lost_in_unusual_passes(run_on: Any) -> None:
    results = zip(*run_on(2, train_in_unusual_passes), strict=True)
    for how, ranks in zip(UNUSUAL.values(), results, strict=True):
        assert_agreed(list(ranks))
        facts = {key: how[key] for key in ("model", "unused") if key in how}
        assert_conserved(
            list(ranks), gradient_sums(2, passes=4 * how.get("micro_steps", 1), **facts)
        )
