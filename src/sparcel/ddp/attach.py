"""Attaching a scheme to a DistributedDataParallel model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparcel.comm import Communicator, Group, TorchCommunicator, resolve
from sparcel.ddp.handle import Handle
from sparcel.ddp.hook import Hook
from sparcel.ddp.policy import Policy, own_densities, stays_dense
from sparcel.ddp.residuals import Residuals
from sparcel.errors import InputError, MismatchError
from sparcel.schemes import Meter, Scheme, connect_nodes, scheme


def attach(
    model: DistributedDataParallel,
    scheme_or_name: Scheme | str,
    *,
    group: Group = None,
    scaler: torch.amp.GradScaler | None = None,
    policy: Policy = stays_dense,
    densities: Mapping[str, float] | None = None,
    **settings: Any,
) -> Handle:
    """Let a scheme exchange the model's gradients from now on; all ranks call.

    Gradients are exchanged bucket by bucket while the backward pass goes on. Small tensors are
    averaged densely, all in one exchange a step; sparse gradients travel as they are.

    Parameters
    ----------
    model
        Wrapped in DDP, before its first backward pass.
    scheme_or_name
        A name that `sparcel.scheme` knows, or a scheme that it made, of which every bucket gets a
        fresh one.
    group
        The ranks that the model was wrapped for: a torch process group, an MPI communicator of
        mpi4py's, a sparcel communicator, or None for the model's own.
    scaler
        The GradScaler in use, if any: memory must not change when its scale does.
    policy
        ``(name, parameter) -> bool``: True for a gradient that stays dense.
    densities
        Densities of single parameters, by pattern of their name, the first that fits:
        ``{"conv1.*": 1, "*.embedding.weight": 0.001}``; 1 leaves the gradient dense.
    settings
        The scheme's, when it is given by name: ``density=0.01``.

    Returns
    -------
    Handle
        Statistics, state for checkpoints, and `Handle.close`.

    Raises
    ------
    InputError
        For a model that is not DDP, has a hook already, or uses DDP's ``mixed_precision`` or the
        Python reducer; for a scheme or a setting that does not exist; for a group of other ranks;
        for nodes with different numbers of ranks.
    MismatchError
        When the ranks' schemes, settings, policies, densities or parameters differ.

    Notes
    -----
    A hook cannot be taken off a DDP model again: wrap the module anew. Where a rank's gradient
    holds NaN or Inf, all ranks get NaN, and no memory changes in that step. An error of the
    exchange is raised by ``backward()``, on every rank; memory is then as it was before the step,
    and the DDP object cannot be used any more, as after any exception that ends a backward pass:
    wrap the module anew, attach, and give the new handle the old one's ``state_dict()``.
    ``no_sync()``, ``join()`` and reentrant checkpointing work as with DDP alone.
    """
    _check_model(model)
    if isinstance(scheme_or_name, Scheme):
        if settings:
            raise InputError(
                f"settings go with a scheme's name; this scheme has its own, got {settings}"
            )
        template = scheme_or_name.fresh()
    else:
        template = scheme(scheme_or_name, **settings)
    trained = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    }
    # A dense scheme serves small tensors as well as large ones, and has nothing to remember.
    sparse = bool(template.remembers)
    given = own_densities(densities or {}, trained)
    if given and not sparse:
        raise InputError(f"densities are for schemes that select, got {template}, which sends all")
    small = {
        name
        for name, p in trained.items()
        if sparse and (given.get(name) == 1 or (name not in given and policy(name, p)))
    }
    travel_as_rows = _parameters_with_rows(model.module)
    remembered = {
        name: p
        for name, p in trained.items()
        if sparse and name not in small and id(p) not in travel_as_rows
    }
    comm, owned = _communicator(model, group)
    try:
        _check_ranks(model, comm)
        _check_alike(comm, template, scaler is not None, trained, small, given)
        comm.run(lambda: connect_nodes(template, comm))
    except Exception:
        if owned is not None:
            owned.close()
        raise
    residuals, meter = Residuals(template), Meter()
    scaler = scaler if sparse else None
    hook = Hook(model, comm, meter, residuals, small, given, scaler)
    handle = Handle(comm, owned, hook, residuals, remembered, meter)
    model.register_comm_hook(None, hook.queue_bucket)
    return handle


def _check_model(model: DistributedDataParallel) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise InputError(
            f"model must be a DistributedDataParallel, got {type(model).__name__}; wrap it first:"
            " DistributedDataParallel(model)"
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
            " the module in a new DistributedDataParallel"
        )


def _communicator(
    model: DistributedDataParallel, group: Group
) -> tuple[Communicator, TorchCommunicator | None]:
    """Return the communicator to use, and again if it is made here, to be closed with the handle.

    One made here carries nothing else, so that buckets never wait for the user's collectives.
    """
    if group is None or isinstance(group, dist.ProcessGroup):
        owned = TorchCommunicator.of(model.process_group if group is None else group)
        return owned, owned
    return resolve(group), None


def _check_ranks(model: DistributedDataParallel, comm: Communicator) -> None:
    ranks = dist.get_world_size(model.process_group)
    if comm.size != ranks:
        raise InputError(
            f"the model was wrapped for {ranks} ranks, group has {comm.size}; pass the same"
            " process group to both, or none to sparcel"
        )
    if comm.device.type != model.device.type:
        raise InputError(
            f"the model's gradients are on {model.device}, the group communicates from"
            f" {comm.device}; use NCCL for a model on GPUs and Gloo for one on the CPU"
        )


def _check_alike(
    comm: Communicator,
    template: Scheme,
    scaled: bool,
    trained: dict[str, Tensor],
    small: Collection[str],
    given: Mapping[str, float],
) -> None:
    """Compare what ranks attach: where it differs, they would hang or misread each other."""
    layout = [
        (name, p.shape, p.dtype, name in small, given.get(name)) for name, p in trained.items()
    ]
    digest = hashlib.blake2b(repr((template, scaled, layout)).encode(), digest_size=7).digest()
    digests = comm.run(lambda: comm.gather_numbers(int.from_bytes(digest)))
    others = [rank for rank, other in enumerate(digests) if other != digests[comm.rank]]
    if others:
        raise MismatchError(
            f"ranks {others} attach something else than rank {comm.rank}, which has {template}"
            f" for {len(trained)} parameters, {len(small)} of them small; give every rank the same"
            " scheme, settings, policy, densities and model, and a scaler to all or to none"
        )


def _parameters_with_rows(module: nn.Module) -> set[int]:
    """Return the ids of the parameters whose gradients are sparse, by the rule that DDP has."""
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
