"""What FSDP2 can do besides: each feature trains with sparcel as it does with dense sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import sparcel
from sparcel.core.comm import Communicator
from tests.fsdp.models import mesh_of, whole
from tests.fsdp.nets import Layer, Net, loss_of

pytestmark = pytest.mark.processes

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_SUMS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)


def by_columns(parameter: nn.Parameter) -> Shard:
    return Shard(1 if parameter.ndim > 1 and parameter.shape[1] % 2 == 0 else 0)


def unchanged(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    made: nn.Module = torch.compile(model, backend="aot_eager")
    return made


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Layer))
    return model


Change = Callable[[nn.Module], nn.Module]

FEATURES: dict[str, tuple[dict[str, Any], Change, Change, float]] = {
    "computing in bfloat16": ({"mp_policy": BF16}, unchanged, unchanged, 0.0),
    "bfloat16 sums": ({"mp_policy": BF16_SUMS}, unchanged, unchanged, 3e-3),
    "float16": ({"mp_policy": FP16}, unchanged, unchanged, 1e-3),
    "offloading": (
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        unchanged,
        unchanged,
        0.0,
    ),
    "sharded columns": ({"shard_placement_fn": by_columns}, unchanged, unchanged, 0.0),
    "activation checkpoints": ({}, checkpointed, unchanged, 0.0),
    "compiled": ({}, unchanged, compiled, 0.0),
}
"""Settings of fully_shard, changes before and after it, and how far values may be apart."""


def trained(
    comm: Communicator, name: str, dense: bool, replicated: bool = False
) -> tuple[list[torch.Tensor], list[str]]:
    settings, before, after, _ = FEATURES.get(name, ({}, unchanged, unchanged, 0.0))
    apply = replicate if replicated else fully_shard
    if replicated:
        mesh = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("replicate", "alone"))
        inside = mesh["replicate"] if dense else mesh["alone"]
    else:
        mesh = mesh_of(2, comm.size // 2)
        inside = mesh if dense else mesh["shard"]
    model: Any = before(Net())
    for block in model.blocks:
        apply(block, mesh=inside, **settings)
    apply(model, mesh=inside, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    handle, names = None, []
    if not dense:
        handle = sparcel.attach(
            model, "topk", density=1, replicate=mesh["replicate"], optimizer=optimizer
        )
        names = sorted(handle.sparse)
    call = after(model)
    for step in range(3):
        loss_of(call, comm.rank, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.close()
    return [whole(one) for one in model.state_dict().values()], names


def apart(comm: Communicator, name: str, replicated: bool = False) -> tuple[float, list[str]]:
    """Return how far training with all coordinates sent ends from FSDP's own, and the names."""
    dense, _ = trained(comm, name, dense=True, replicated=replicated)
    ours, names = trained(comm, name, dense=False, replicated=replicated)
    return max((a - b).abs().max().item() for a, b in zip(dense, ours, strict=True)), names


NAMES = ["blocks.0.inner.0.weight", "blocks.0.inner.2.weight", "first.weight"]


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.filterwarnings("ignore:density=1 sends")
def test_features_train_as_without_sparcel(run_on: Any, name: str) -> None:
    for distance, names in run_on(4, apart, name):
        assert distance <= FEATURES[name][-1]
        assert set(NAMES) <= set(names)


def beside_tensor_parallelism(
    comm: Communicator, dense: bool, density: float = 1
) -> list[torch.Tensor]:
    """Train with linear layers of two ranks; return all parameters, and at last what two share."""
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", (2, 1, comm.size // 2), mesh_dim_names=names)
    model = Net(inner=64)
    for block in model.blocks:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(block.inner, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["replicate", "shard"] if dense else mesh["shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"] if dense else mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    handle = None
    if not dense:
        handle = sparcel.attach(
            model, "topk", density=density, replicate=mesh["replicate"], optimizer=optimizer
        )
    for step in range(3):
        loss_of(model, mesh["replicate"].get_local_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        assert "first.weight" not in handle.sparse  # each of the two would select for itself
        handle.close()
    return [*map(whole, model.state_dict().values()), whole(model.first.weight)]


@pytest.mark.filterwarnings("ignore:density=1 sends")
def test_tensor_parallelism_trains_as_without_sparcel(run_on: Any) -> None:
    dense, ours = (run_on(4, beside_tensor_parallelism, dense) for dense in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(dense[0], ours[0], strict=True))
    sparse = run_on(4, beside_tensor_parallelism, False, 0.05)
    assert all(torch.equal(one[-1], sparse[0][-1]) for one in sparse)


@pytest.mark.filterwarnings("ignore:density=1 sends")
def test_replicate_trains_as_without_sparcel(run_on: Any) -> None:
    for distance, names in run_on(2, apart, "plain", True):
        assert distance == 0
        assert set(NAMES) <= set(names)
