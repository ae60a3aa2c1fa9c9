"""attach(): an averager for a wrapped model, and the driver that its wrapper needs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Unpack

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from sparcel.core._checks import check_callable, check_type, checked_flag
from sparcel.core.comm import Group
from sparcel.core.ddp import DDPDriver
from sparcel.core.fsdp import FSDPDriver, Replicas, is_sharded
from sparcel.core.optim import is_muon
from sparcel.core.rates import Rates
from sparcel.core.schemes import Scheme, Settings, chosen_scheme
from sparcel.core.training import Averager, Carrier, Handle, Policy, Scope, stays_dense
from sparcel.core.training.driver import (
    Driver,
    check_momentum,
    check_updates,
    checked_optimizers,
    model_patterns,
    warn_if_alone,
)
from sparcel.errors import InputError, checked_name

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def attach(
    model: DistributedDataParallel | FSDPModule,
    scheme_or_name: Scheme | str | None = None,
    *,
    replicate: Replicas = None,
    group: Group = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    policy: Policy = stays_dense,
    densities: Mapping[str, float] | None = None,
    rates: Rates | str | PathLike[str] | None = None,
    carrier: Carrier = "host",
    scope: Scope = "bucket",
    ahead: bool = True,
    frontload: bool = True,
    **settings: Unpack[Settings],
) -> Handle:
    """Let a scheme exchange the model's gradients from now on; all ranks call.

    Gradients are exchanged bucket by bucket while the backward pass goes on, or all at its end
    with ``scope="model"``. Small tensors are averaged densely, all in one exchange a step; sparse
    gradients travel as they are. Of a model that ``fully_shard`` shards, each rank exchanges its
    shards with the ranks that hold the same ones.

    Parameters
    ----------
    model
        Wrapped in DDP, before its first backward pass. Or one to which ``fully_shard`` was applied,
        as a whole and to its blocks, over a mesh of one dimension; or ``replicate``, over a mesh
        of one rank.
    scheme_or_name
        A name that `sparcel.scheme` knows, or a scheme that it made. By default what is
        recommended: ``"bidirectional"`` with all coordinates in 5 bits (``density=1,
        format="packed:5"``); where ``optimizer`` has Muon, in 8 bits (``format="packed:8"``). On
        slow links, ``density=0.1, format="packed:4"`` sends 10 % and returns 30 % of the sums.
        Every bucket, or the model, gets a fresh scheme with these settings.
    replicate
        For ``fully_shard`` and ``replicate``: the ranks that hold the same shards as this one,
        ``mesh["replicate"]`` or a process group.
    group
        All ranks that train the model: a torch process group, an MPI communicator of mpi4py, a
        sparcel communicator, or None for the model's own.
    scaler, policy, densities, rates, frontload
        As for `sparcel.training.Averager`, by the names of the parameters in the model before it
        was compiled or wrapped, here as in checkpoints.
    carrier
        What carries gradients on a GPU: ``"host"``, which goes by way of pinned memory over any
        group, also of processes that share a GPU; or ``"nccl"``, which has never run. DDP and FSDP
        themselves stay on their process groups.
    optimizer
        The optimiser in use, or several. Pass them where Muon trains: the recommended scheme
        depends on it. And to resume bit by bit with ``ahead``: otherwise the first pass after a
        checkpoint is not ahead. If the scheme corrects momentum (``momentum=``, and
        ``"dgc"`` without being asked), it must have none for the parameters in ``handle.sparse``.
    scope
        Over what one selection is made: ``"bucket"``, each bucket of DDP, or the shards of each
        module that ``fully_shard`` was applied to, with k by its size and density; ``"model"``, all
        gradients of the rank, with one k. See docs/how-to/ddp.md for what this costs.
    ahead
        Whether each rank computes its gradients where its own memory would bring the parameters
        (step-ahead), see `sparcel.training.Ahead`: what brings training at densities below 1 closer
        to dense training.
        The model computes with moved values while it is called in training mode, and where a
        checkpoint calls a part of it again; the parameters themselves stay as they are.
        ``optimizer`` is found at its first step if it is not given.
    settings
        Settings of a scheme that is given by name, or of the recommended one: ``density=0.1``.

    Returns
    -------
    Handle
        Statistics, state for checkpoints, and `Handle.close`.

    Raises
    ------
    InputError
        For a model that is wrapped by none of these, or by another wrapper as well (FSDP1,
        DataParallel, a second DDP, torch.compile), has a hook already, runs optimisers in the
        backward pass, or uses DDP's ``mixed_precision`` or the Python reducer; for a model that
        ``fully_shard`` shards only in part, or averages over replicas by itself; for replicas that
        form no grid with the shards; for ``ahead`` where FSDP has no place for it; for a scheme or
        a setting that does not exist; for momentum of both scheme and optimiser; for a group of
        other ranks; for an unknown scope; for a carrier that the group or the model's device does
        not allow; for nodes with different numbers of ranks; during the backward pass, if it is
        being captured in a CUDA graph.
    MismatchError
        When the ranks' schemes, settings, policies, densities, carriers, scopes, front-loading or
        parameters differ.

    Warns
    -----
    SparcelWarning
        Printed by rank 0 alone. For a single replica, with a scheme that keeps something back; for
        a scheme with momentum if ``optimizer`` is not given; for ``density=1`` in a format that
        rounds nothing; for ``densities`` with a scheme that sends all, which wait for
        `Handle.switch`; with ``ahead``, for Muon if the scheme is not what is
        recommended there, and for an optimiser whose
        steps are not known (see `sparcel.training.Ahead`), now or at its first step.

    Notes
    -----
    DDP cannot remove a hook: to train without it, wrap the module anew. A sharded model can be
    attached again once its handle is closed. If any gradient of any rank
    holds NaN or Inf, all gradients of all ranks become NaN, and no memory changes in that step.
    ``backward()`` raises errors of the exchange on every rank. Memory is then as it was before the
    step, and the DDP object cannot be used any more, as after any exception that ends a backward
    pass: ``close()`` the handle, wrap the module anew, attach, and give the new handle the
    ``state_dict()`` of the old one. ``no_sync()``, ``join()`` and checkpoints of activations work
    as with DDP alone. docs/how-to/fsdp.md tells what works with ``fully_shard``.
    """
    if replicate is not None or is_sharded(model):
        driver: Driver = FSDPDriver(model, replicate, group)
    else:
        driver = DDPDriver(model, group)
    checked_flag(ahead, "ahead")
    check_callable(policy, "policy")
    optimizers = checked_optimizers(optimizer)
    for one in optimizers:
        check_updates(one, driver.parameters.values())
    if densities is not None:
        check_type(densities, Mapping, "densities")
    _check_scheme(scheme_or_name, settings)
    chosen = chosen_scheme(scheme_or_name, settings, any(map(is_muon, optimizers)))
    averager = Averager(
        driver.tensors,
        chosen,
        group=driver.group,
        scaler=scaler,
        policy=lambda name, _: policy(name, driver.parameters[name]),
        densities=model_patterns(densities or {}, driver.tensors),
        rates=rates,
        carrier=carrier,
        scope=scope,
        rows=driver.rows,
        frontload=frontload,
        withhold_zeros=driver.withhold_zeros,
        shard=driver.shard,
    )
    try:  # a warning may be made an error
        _start(driver, averager, optimizers, chosen.momentum, ahead)
    except Exception:
        averager.handle.close()
        raise
    return averager.handle


def _check_scheme(scheme_or_name: object, settings: Settings) -> None:
    """Raise `InputError` if `attach` was given something else as its scheme, or as a setting."""
    if "scheme" in settings:
        raise InputError(
            "scheme is no argument of attach; pass it after the model, without a name:"
            ' attach(model, "topk")'
        )
    for name in settings:
        checked_name(name, [*_OWN_SETTINGS, *Settings.__annotations__], "an argument of attach")
    for kind, argument in _BY_NAME.items():
        if isinstance(scheme_or_name, kind):
            raise InputError(
                f"the argument after the model is a scheme, got {type(scheme_or_name).__name__};"
                f" give that by name: attach(model, {argument}=...)"
            )


def _start(
    driver: Driver,
    averager: Averager,
    optimizers: Sequence[torch.optim.Optimizer],
    momentum: float,
    ahead: bool,
) -> None:
    """Give warnings, let parameters be moved ahead, and begin to take gradients."""
    handle = averager.handle
    sparse = {name: driver.parameters[name] for name in handle.sparse}
    warn_if_alone(averager.comm.size, handle.sparse)
    if momentum and sparse:
        check_momentum(optimizers, momentum, sparse)
    if ahead and handle.eligible:
        moving = driver.move_ahead(averager, handle.eligible)
        averager.on_close(moving.end)
        for one in optimizers:
            moving.follow(one)
    driver.start(averager)


_BY_NAME: Mapping[type, str] = {
    torch.optim.Optimizer: "optimizer",
    torch.amp.GradScaler: "scaler",
    DeviceMesh: "replicate",
    ProcessGroup: "group",
}
"""What may stand in the scheme's place by mistake, and the argument that takes it."""

_OWN_SETTINGS = tuple(
    name
    for name, parameter in inspect.signature(attach).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)
