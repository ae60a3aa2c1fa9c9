"""Models that attach refuses because not all of their gradients would go through its hook."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from sparcel.core.comm import Communicator
from sparcel.errors import InputError
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes

Wrap = Callable[[nn.Module], nn.Module]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))


def compiled(module: nn.Module) -> nn.Module:
    made: nn.Module = torch.compile(module, backend="eager")
    return made


def fsdp(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def hybrid_fsdp(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        module,
        device_id=torch.device("cpu"),
        device_mesh=mesh(1, 2),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("across", "inside")[-len(shape) :])


def sharded_inside(module: nn.Module) -> nn.Module:
    fully_shard(module.get_submodule("module"))  # DDP takes no parameters that are sharded already
    return module


def in_backward(module: nn.Module) -> nn.Module:
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    return module


def hooked(module: nn.Module) -> nn.Module:
    assert isinstance(module, DistributedDataParallel)
    module.register_comm_hook(None, allreduce_hook)
    return module


def fp16_hooked(module: nn.Module) -> nn.Module:
    assert isinstance(module, DistributedDataParallel)
    module._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return module


def attached(module: nn.Module) -> nn.Module:
    assert isinstance(module, DistributedDataParallel)
    attach_evenly(module, "topk").close()
    return module


def with_python_reducer(module: nn.Module) -> nn.Module:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return DistributedDataParallel(module)


ddp = DistributedDataParallel
without_unused = partial(DistributedDataParallel, skip_all_reduce_unused_params=True)
in_bf16 = partial(DistributedDataParallel, mixed_precision=_MixedPrecision(torch.bfloat16))
INSTEAD = "wrap the plain module in DistributedDataParallel instead"

WRAPPED: dict[str, tuple[list[Wrap], str]] = {
    "nothing": ([], "got Sequential; wrap it first: DistributedDataParallel(model)"),
    "compiled": ([compiled], "got OptimizedModule; wrap it first"),
    "compiled DDP": ([ddp, compiled], "compiled DistributedDataParallel; attach before it is"),
    "FSDP1": (
        [fsdp],
        f"(FSDP1, HSDP), which shards gradients; {INSTEAD}",
    ),
    "hybrid FSDP1": ([hybrid_fsdp], "wrapped by FullyShardedDataParallel (FSDP1, HSDP)"),
    "FSDP2 in DDP": ([ddp, sharded_inside], "'module' is wrapped by fully_shard (FSDP2), which"),
    "replicate": ([replicate], f"wrapped by replicate, which has no hook for sparcel; {INSTEAD}"),
    "DataParallel": ([nn.DataParallel], f"start a process for each device, and {INSTEAD}"),
    "DDP in a module": (
        [ddp, nn.Sequential],
        "a Sequential that holds a DistributedDataParallel; attach to that one:"
        " model.get_submodule('0')",
    ),
    "DDP in DDP": ([ddp, ddp], "holds another DistributedDataParallel, 'module'"),
    "DDP in a module in DDP": ([ddp, nn.Sequential, ddp], "DistributedDataParallel, 'module.0'"),
    "compiled DDP in DDP": ([ddp, compiled, ddp], "DistributedDataParallel, 'module._orig_mod'"),
    "replicate in DDP": ([replicate, nn.Sequential, ddp], "'module.0' is wrapped by replicate"),
    "DDP in FSDP1": ([ddp, fsdp], "wrapped by FullyShardedDataParallel"),
    "DDP in DataParallel": ([ddp, nn.DataParallel], "wrapped by DataParallel"),
    "optimisers in the backward pass": ([in_backward, ddp], "call its step() after backward()"),
    "mixed precision of DDP": ([in_bf16], "DDP's mixed_precision"),
    "skipped buckets": ([without_unused], "skip_all_reduce_unused_params leaves buckets out"),
    "Python reducer": ([with_python_reducer], "DDP's Python reducer"),
    "hook": (
        [ddp, hooked],
        "(allreduce_hook) and DDP takes only one; wrap its module anew",
    ),
    "built-in hook": ([ddp, fp16_hooked], "FP16_COMPRESS) and DDP takes only one"),
    "attached": ([ddp, attached], "Hook.queue_bucket) and DDP takes only one"),
}
"""What was done to a module, in order, and a part of the error."""


def refused(comm: Communicator) -> dict[str, str]:
    """Return what is said of each model."""
    said = {}
    for name, (wraps, _) in WRAPPED.items():
        model = net()
        for wrap in wraps:
            model = wrap(model)
        with pytest.raises(InputError) as raised:
            attach_evenly(model, "topk")  # type: ignore[arg-type]
        said[name] = str(raised.value)
    return said


def test_wrappers_are_named_with_the_right_way(run_on: Any) -> None:
    for said in run_on(2, refused):
        for name, (_, expected) in WRAPPED.items():
            assert expected in said[name], name


def updates(comm: Communicator, order: str) -> list[torch.Tensor]:
    """Return the updates of a step."""
    torch.manual_seed(0)
    module = net()
    wrapped = ddp(compiled(module) if order == "compile first" else module)
    handle = attach_evenly(wrapped, "topk", density=0.1)
    model = compiled(wrapped) if order == "compile last" else wrapped
    model(torch.full((1, 64), comm.rank + 1.0)).sum().backward()
    assert handle.stats().bytes_sent > 0
    handle.close()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("order", ["compile first", "compile last"])
def test_compiled_models_exchange_as_others_do(run_on: Any, order: str) -> None:
    plain, made = run_on(2, updates, "plain"), run_on(2, updates, order)
    for mine, theirs in zip(made, plain, strict=True):
        assert all(map(torch.equal, mine, theirs))
