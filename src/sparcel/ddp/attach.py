"""Attaching a scheme to a DistributedDataParallel model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from os import PathLike
from typing import Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparcel._checks import check_type, flag
from sparcel.comm import Group, resolve
from sparcel.ddp.ahead import AheadCalls
from sparcel.ddp.buckets import as_in_buckets
from sparcel.ddp.hook import Hook
from sparcel.ddp.model import check_model
from sparcel.ddp.names import model_name, model_patterns
from sparcel.ddp.optimizer import check_momentum
from sparcel.errors import InputError, known
from sparcel.rates import Rates
from sparcel.schemes import Scheme, Settings, chosen_scheme
from sparcel.training import Averager, Carrier, Handle, Policy, Scope, stays_dense


def attach(
    model: DistributedDataParallel,
    scheme_or_name: Scheme | str | None = None,
    *,
    group: Group = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    policy: Policy = stays_dense,
    densities: Mapping[str, float] | None = None,
    rates: Rates | str | PathLike[str] | None = None,
    carrier: Carrier = "auto",
    scope: Scope = "bucket",
    ahead: bool = True,
    frontload: bool = True,
    **settings: Unpack[Settings],
) -> Handle:
    """Let a scheme exchange the model's gradients from now on; all ranks call.

    Gradients are exchanged bucket by bucket while the backward pass goes on, or all at its end
    with ``scope="model"``. Small tensors are averaged densely, all in one exchange a step; sparse
    gradients travel as they are.

    Parameters
    ----------
    model
        Wrapped in DDP, before its first backward pass.
    scheme_or_name
        A name that `sparcel.scheme` knows, or a scheme that it made. By default what is
        recommended: ``"oktopk"`` at a density of 10 %, with 4-bit values (``format="packed:4"``).
        Every bucket, or the model, gets a fresh scheme with these settings.
    group
        The ranks that the model was wrapped for: a torch process group, an MPI communicator of
        mpi4py, a sparcel communicator, or None for the model's process group.
    scaler, policy, densities, rates, frontload
        As for `sparcel.training.Averager`, by the names of the parameters in the model before it
        was compiled or wrapped, here as in checkpoints.
    carrier
        What carries gradients on a GPU: ``"nccl"``; ``"host"``, which goes by way of pinned memory
        over any group, also of processes that share a GPU; or ``"auto"``, NCCL if the process group
        has it, unless ``rates`` (not ``"measure"``) say that nodes are joined by up to 25 Gbit/s.
        DDP itself stays on its process group. Leave it out for a model on the CPU.
    optimizer
        The optimiser in use. Pass it to resume bit by bit with ``ahead``: otherwise the first pass
        after a checkpoint is not ahead. If the scheme corrects momentum (``momentum=``, and
        ``"dgc"`` without being asked), it must have none for the parameters in ``handle.sparse``.
    scope
        Over what one selection is made: ``"bucket"``, each bucket of DDP, with k by its size and
        density; ``"model"``, all gradients, with one k. See docs/training.md for what this costs.
    ahead
        Whether each rank computes its gradients where its own memory would bring the parameters
        (step-ahead), see `sparcel.training.Ahead`: what brings training at low densities closer to
        dense training.
        The model computes with moved values while it is called in training mode, and where a
        checkpoint calls a part of it again; the parameters themselves stay as they are.
        ``optimizer`` is found at its first step if it is not given.
    settings
        Settings of a scheme that is given by name, or of the recommended one: ``density=0.01``.

    Returns
    -------
    Handle
        Statistics, state for checkpoints, and `Handle.close`.

    Raises
    ------
    InputError
        For a model that is not DDP, or is in or around another wrapper (FSDP, ``replicate``,
        DataParallel, a second DDP, torch.compile), has a hook already, runs optimisers in the
        backward pass, or uses DDP's ``mixed_precision`` or the Python reducer; for a scheme or a
        setting that does not exist; for momentum of both scheme and optimiser; for a group of other
        ranks; for an unknown scope; for a carrier that the group or the model's device does not
        allow; for nodes with different numbers of ranks; during the backward pass, if it is being
        captured in a CUDA graph.
    MismatchError
        When the ranks' schemes, settings, policies, densities, carriers, scopes, front-loading or
        parameters differ.

    Warns
    -----
    SparcelWarning
        For a scheme with momentum if ``optimizer`` is not given; for ``density=1``; for
        ``densities`` with a scheme that sends all, which wait for `Handle.switch`; with ``ahead``,
        for an optimiser whose steps are not known (see `sparcel.training.Ahead`), now or at its
        first step.

    Notes
    -----
    DDP cannot remove a hook: to train without it, wrap the module anew. If any gradient of any rank
    holds NaN or Inf, all gradients of all ranks become NaN, and no memory changes in that step.
    ``backward()`` raises errors of the exchange on every rank. Memory is then as it was before the
    step, and the DDP object cannot be used any more, as after any exception that ends a backward
    pass: ``close()`` the handle, wrap the module anew, attach, and give the new handle the
    ``state_dict()`` of the old one. ``no_sync()``, ``join()`` and checkpoints of activations work
    as with DDP alone.
    """
    check_model(model)
    flag(ahead, "ahead")
    if optimizer is not None:
        check_type(optimizer, torch.optim.Optimizer, "optimizer")
    if densities is not None:
        check_type(densities, Mapping, "densities")
    for name in settings:
        known(name, [*_OWN_SETTINGS, *Settings.__annotations__], "an argument of attach")
    chosen = chosen_scheme(scheme_or_name, settings)
    group = model.process_group if group is None else group
    _check_ranks(model, group)
    parameters = {
        model_name(name): parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    }
    averager = Averager(
        parameters,
        chosen,
        group=group,
        scaler=scaler,
        policy=policy,
        densities=model_patterns(densities or {}, parameters),
        rates=rates,
        carrier=carrier,
        scope=scope,
        frontload=frontload,
        rows=_parameters_with_rows(model.module),
        # DDP throws away the update of a parameter that no rank used, so none may be sent.
        withhold_zeros=model.find_unused_parameters or model.static_graph,
    )
    handle, momentum = averager.handle, chosen.momentum
    sparse = {name: parameters[name] for name in handle.sparse}
    try:  # a warning may be made an error
        if momentum and sparse:
            check_momentum(optimizer, momentum, sparse)
        if ahead and handle.eligible:
            movable = {name: parameters[name] for name in handle.eligible}
            arranged = as_in_buckets(movable.values())
            calls = AheadCalls(model.module, averager.ahead(movable, arrange=arranged))
            averager.on_close(calls.end)
            if optimizer is not None:
                calls.follow(optimizer)
    except Exception:
        handle.close()
        raise
    model.register_comm_hook(None, Hook(model, averager).queue_bucket)
    return handle


_OWN_SETTINGS = tuple(
    name
    for name, parameter in inspect.signature(attach).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)


def _check_ranks(model: DistributedDataParallel, group: Group) -> None:
    ranks = dist.get_world_size(model.process_group)
    given = group.size() if isinstance(group, dist.ProcessGroup) else resolve(group).size
    if given != ranks:
        raise InputError(
            f"the model was wrapped for {ranks} ranks, group has {given}; pass the same process"
            " group to both, or none to sparcel"
        )


def _parameters_with_rows(module: nn.Module) -> set[str]:
    """Return the names of the parameters whose gradients are sparse, by the rule that DDP has."""
    weights = {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
    return {
        model_name(name)
        for name, parameter in module.named_parameters()
        if id(parameter) in weights
    }
