"""Sharded models, averaged over replicas: nothing is lost, all replicas agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from sparcel.comm import Communicator
from tests.fsdp.models import (
    Trained,
    assert_agreed,
    assert_conserved,
    shard,
    sums_of,
    train,
)

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("replicas", "scheme", "settings"),
    [
        (2, "topk", {"density": 0.02}),
        (2, "oktopk", {"density": 0.05}),
        (4, "gtopk", {"density": 0.02}),
        (2, "scalecom", {"density": 0.02, "beta": 1.0}),
        (2, "topk", {"density": 0.02, "scope": "model"}),
        (2, "dense", {}),
        (1, "topk", {"density": 0.02}),
    ],
)
def test_nothing_is_lost_and_replicas_agree(
    run_on: Any, replicas: int, scheme: str, settings: dict[str, Any]
) -> None:
    trained = run_on(4, train_with, replicas, scheme, settings)
    assert_agreed(trained)
    assert_conserved(trained, replicas, sums_of(4, replicas, 4))
    assert trained[0].stats.steps == 4


def train_with(comm: Communicator, replicas: int, scheme: str, settings: dict[str, Any]) -> Trained:
    return train(comm, replicas, scheme, **settings)
