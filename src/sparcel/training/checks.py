"""What arguments, tensors and gradients have to be like."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparcel._checks import FLOAT_DTYPES, check_callable, check_type
from sparcel.comm import Communicator
from sparcel.errors import InputError, warn_on_rank_0
from sparcel.memory import Range
from sparcel.rates import Rates
from sparcel.schemes import Scheme
from sparcel.training.policy import Policy, Treatment


def checked_optimizers(given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return optimisers, of which one, several or none are given; raise `InputError` for others."""
    several = [] if given is None else given
    optimizers = list(several) if isinstance(several, Sequence) else [several]
    for one in optimizers:
        check_type(one, Optimizer, "optimizer")
    return [_with_hooks(one) for one in optimizers]


def _with_hooks(optimizer: Optimizer) -> Optimizer:
    """Return an optimiser, or the one inside of it that does its steps.

    Some that wrap another, as Accelerate's, are Optimizers without what the class would set up.
    """
    while "_optimizer_step_post_hooks" not in vars(optimizer):
        inside = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]
        if len(inside) != 1:
            raise InputError(
                f"{type(optimizer).__name__} takes no hooks, which torch.optim.Optimizer.__init__"
                " sets up; give the optimiser that it wraps"
            )
        optimizer = inside[0]
    return optimizer


def check_updates(optimizer: Optimizer, tensors: Iterable[Tensor]) -> None:
    """Raise an `InputError` if an optimiser updates none of a model's parameters."""
    ids = {id(one) for one in tensors}
    if not any(id(one) in ids for group in optimizer.param_groups for one in group["params"]):
        raise InputError(
            "optimizer updates none of the model's parameters; pass the one that does, and make it"
            " after fully_shard, which replaces parameters"
        )


def check_arguments(
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    scaler: torch.amp.GradScaler | None,
    policy: Policy,
    densities: Mapping[str, float] | None,
    rows: Collection[str],
    rates: Rates | str | PathLike[str] | None,
) -> None:
    """Raise an `InputError` that names the argument of an averager that is of a wrong type."""
    check_type(tensors, Mapping, "tensors", "such as dict(model.named_parameters())")
    for name, tensor in tensors.items():
        check_type(tensor, Tensor, f"tensors[{name!r}]")
    check_type(scheme, Scheme, "scheme", "sparcel.scheme('topk') makes one")
    if scaler is not None:
        check_type(scaler, torch.amp.GradScaler, "scaler")
    check_callable(policy, "policy")
    if densities is not None:
        check_type(densities, Mapping, "densities")
    if isinstance(rows, str) or not isinstance(rows, Collection):
        raise InputError(f"rows must be a list of names, got {rows!r}")
    if not (rates is None or isinstance(rates, Rates | str | PathLike)):
        raise InputError(f'rates must be Rates, "measure" or the path of a file, got {rates!r}')


def warn_if_alone(ranks: int, sparse: Collection[str]) -> None:
    """Warn if only one rank averages the tensors, some of which are made sparse."""
    if ranks == 1 and sparse:
        warn_on_rank_0(
            "there is only one replica: nothing is exchanged, but a part of the gradients is kept"
            " back; attach only where there are several replicas"
        )


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Return the device of the first tensor, before `check_device` looks at all of them."""
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def check_device(tensors: Mapping[str, Tensor], comm: Communicator) -> torch.device:
    """Return the one device that all tensors are on, if the communicator reaches it.

    Raises
    ------
    InputError
        When there are no tensors, or they hold no floats, or floats of 8 bits, or they are on
        several devices or another type of device.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT_DTYPES:
            raise InputError(
                f"tensors must hold floats to be averaged, of 16 bits or more, {name!r} has"
                f" {tensor.dtype}"
            )
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        found = sorted(map(str, devices)) or "no tensors"
        raise InputError(f"tensors must be on one device, got {found}")
    device = devices.pop()
    if comm.device != device:
        raise InputError(
            f"the tensors are on {device}, the group communicates from {comm.device}; sparcel takes"
            " tensors of the CPU, over any group but one of NCCL alone, and of GPUs of CUDA"
        )
    return device


def check_switch(before: Scheme, after: Scheme) -> None:
    """Raise `InputError` unless what one scheme remembers means the same to another."""
    if before.momentum != after.momentum:
        raise InputError(
            f"{before} corrects momentum={before.momentum:g}, and {after} corrects"
            f" {after.momentum:g}: memory is a sum of velocities or of gradients, and the"
            " optimiser's momentum has to fit; switch between schemes of the same momentum"
        )


def check_vector(vector: Tensor, places: Mapping[str, Range], device: torch.device) -> None:
    """Raise `InputError` unless a vector holds floats there, end to end, and places are a mapping.

    An error that a job raised would end the communicator.
    """
    check_type(vector, Tensor, "vector")
    check_type(places, Mapping, "places")
    if vector.dtype not in FLOAT_DTYPES or vector.layout != torch.strided:
        raise InputError(
            f"a vector of tensors must be dense, of one of {FLOAT_DTYPES}, got {vector.dtype},"
            f" {vector.layout}"
        )
    if vector.device != device:
        raise InputError(
            f"the averager was made for tensors on {device}, got a vector on {vector.device}"
        )
    if vector.ndim != 1 or not vector.is_contiguous():
        raise InputError(
            f"a vector of tensors must be one-dimensional and contiguous, got shape"
            f" {tuple(vector.shape)}, strides {vector.stride()}; flatten it first"
        )


def check_gradients(gradients: Mapping[str, Tensor], treatment: Treatment) -> None:
    """Raise `InputError` unless the gradients are like the tensors that they are to update."""
    check_type(gradients, Mapping, "gradients")
    tensors = treatment.tensors
    if gradients.keys() != tensors.keys():
        missing = sorted(tensors.keys() - gradients.keys())
        unknown = sorted(gradients.keys() - tensors.keys())
        raise InputError(
            f"gradients must have the names of the averager's tensors; missing {missing}, unknown"
            f" {unknown}; give zeros for a tensor that was not used"
        )
    for name, gradient in gradients.items():
        check_gradient(name, gradient, treatment)


def check_gradient(name: str, gradient: Tensor, treatment: Treatment) -> None:
    """Raise `InputError` unless a gradient is like the tensor that it is to update."""
    treatment.check_known(name)
    check_type(gradient, Tensor, f"the gradient {name!r}")
    tensor = treatment.tensors[name]
    expected = tensor.shape, tensor.dtype, tensor.device, name in treatment.rows
    found = gradient.shape, gradient.dtype, gradient.device, gradient.is_sparse
    if found != expected:
        raise InputError(
            f"the gradient {name!r} must be {_described(*expected)}, got {_described(*found)};"
            " name sparse gradients in rows="
        )


def _described(shape: torch.Size, dtype: torch.dtype, device: torch.device, sparse: bool) -> str:
    return f"{'sparse' if sparse else 'dense'} {dtype} of shape {tuple(shape)} on {device}"
