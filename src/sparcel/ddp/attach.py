"""Attaching a scheme to a DistributedDataParallel model."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sparcel.comm import Communicator, Group, TorchCommunicator
from sparcel.ddp.handle import Handle
from sparcel.ddp.policy import Policy, stays_dense
from sparcel.errors import InputError
from sparcel.schemes import Scheme, scheme


def attach(
    model: DistributedDataParallel,
    scheme_or_name: Scheme | str,
    *,
    group: Group = None,
    scaler: torch.amp.GradScaler | None = None,
    policy: Policy = stays_dense,
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
        ``"topk"``, ``"sparcml"``, ``"gtopk"``, ``"dense"``, or a scheme made by `sparcel.scheme`,
        of which every bucket gets a fresh one.
    group
        The ranks that the model was wrapped for: a torch process group, a sparcel communicator,
        or None for the model's own.
    scaler
        The GradScaler in use, if any: memory must not change when its scale does.
    policy
        ``(name, parameter) -> bool``: True for a gradient that stays dense.
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
        Python reducer; for a scheme or a setting that does not exist.

    Notes
    -----
    A hook cannot be taken off a DDP model again: wrap the module anew. Where a rank's gradient
    holds NaN or Inf, all ranks get NaN, and no memory changes in that step. An error of the
    exchange is raised by ``backward()``, on every rank; memory is then as it was before the step,
    and the DDP object cannot be used any more.
    """
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
    if model._comm_hooks:
        names = ", ".join(hook.__qualname__ for hook, _ in model._comm_hooks)
        raise InputError(
            f"the model has a communication hook already ({names}) and DDP takes only one; wrap"
            " the module in a new DistributedDataParallel"
        )
    if isinstance(scheme_or_name, Scheme):
        if settings:
            raise InputError(
                f"settings go with a scheme's name; this scheme has its own, got {settings}"
            )
        template = scheme_or_name.fresh()
    else:
        template = scheme(scheme_or_name, **settings)
    if isinstance(group, Communicator):
        handle = Handle(model, group, template, policy, scaler)
    else:
        comm = TorchCommunicator.of(model.process_group if group is None else group)
        handle = Handle(model, comm, template, policy, scaler, owns_communicator=True)
    model.register_comm_hook(None, handle.hook)
    return handle
