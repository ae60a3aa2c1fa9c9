"""Which models `attach` accepts: those whose gradients all go through one hook of DDP."""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.nn.parallel import DistributedDataParallel

from sparcel._checks import check_type
from sparcel.errors import InputError


def checked_model(model: object) -> DistributedDataParallel:
    """Return the model if one hook gets all of its gradients; raise `InputError` otherwise."""
    if isinstance(model, nn.Module):
        _check_wrappers(model)
    way_out = "wrap it first: DistributedDataParallel(model), or fully_shard with replicate="
    check_type(model, DistributedDataParallel, "model", way_out)
    assert isinstance(model, DistributedDataParallel)
    _check_options(model)
    return model


def _check_wrappers(model: nn.Module) -> None:
    """Refuse other wrappers than one DDP around the whole model.

    Wrapping such a model in DDP once more would not help: what is wrapped inside goes on
    exchanging densely, and is averaged twice.
    """
    inside = []
    for path, module in model.named_modules():
        if wrapper := _other_wrapper(module):
            place = f"the model's {path!r}" if path else "the model"
            raise InputError(f"{place} is wrapped by {wrapper}")
        if isinstance(module, DistributedDataParallel) and module is not model:
            inside.append(path)
    if not inside:
        return
    if isinstance(model, DistributedDataParallel):
        raise InputError(
            f"the model holds another DistributedDataParallel, {inside[0]!r}, which would exchange"
            " its gradients densely as well; wrap only once, the whole module"
        )
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "the model is a compiled DistributedDataParallel; attach before it is compiled:"
            " sparcel.attach(ddp, ...) and then torch.compile(ddp)"
        )
    raise InputError(
        f"the model is a {type(model).__name__} that holds a DistributedDataParallel; attach to"
        f" that one: model.get_submodule({inside[0]!r})"
    )


def _other_wrapper(module: nn.Module) -> str | None:
    """Return the wrapper other than DDP that is on a module itself, with the way out."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # takes seconds to import

    applied = _get_registry(module) or {}
    plain = "wrap the plain module in DistributedDataParallel instead"
    if isinstance(module, FullyShardedDataParallel):
        return f"FullyShardedDataParallel (FSDP1, HSDP), which shards gradients; {plain}"
    if "fully_shard" in applied:
        return (
            "fully_shard (FSDP2), which averages gradients itself; attach to the plain model of"
            " fully_shard instead, with replicate="
        )
    if "replicate" in applied:
        return f"replicate, which has no hook for sparcel; {plain}"
    if isinstance(module, nn.DataParallel):
        return f"DataParallel; start a process for each device, and {plain}"
    return None


def _check_options(model: DistributedDataParallel) -> None:
    """Refuse what DDP does to gradients besides averaging them."""
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise InputError(
            "the optimisers of _apply_optimizer_in_backward need DDP's own exchange; make an"
            " optimiser without it, and call its step() after backward()"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise InputError(
            "skip_all_reduce_unused_params leaves buckets out, and sparcel waits for all of them;"
            " wrap the model without it"
        )
    if model.mixed_precision is not None:
        raise InputError(
            "DDP's mixed_precision casts gradients itself; use torch.autocast instead, which"
            " sparcel works with"
        )
    if model._use_python_reducer:
        raise InputError(
            "DDP's Python reducer calls hooks for single parameters; set"
            ' torch._dynamo.config.optimize_ddp to another value than "python_reducer"'
        )
    hook = model._get_ddp_logging_data().get("comm_hook")
    if hook:
        raise InputError(
            f"the model has a communication hook already ({hook}) and DDP takes only one; wrap"
            " its module anew: DistributedDataParallel(model.module)"
        )


def check_join(model: DistributedDataParallel) -> None:
    """Refuse averages over the ranks that still have data, in `DistributedDataParallel.join`."""
    if not model._divide_by_initial_world_size:
        raise InputError(
            "join(divide_by_initial_world_size=False) averages over the ranks that still have data,"
            " and sparcel averages over all ranks, which all owe what they keep back; leave it out"
        )
