"""What tensors and ranks have to agree on before and in every step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from os import PathLike

import torch
from torch import Tensor

from sparcel._checks import check_callable, check_type
from sparcel.comm import Communicator, digest
from sparcel.errors import InputError, MismatchError
from sparcel.memory import Range
from sparcel.rates import Rates
from sparcel.schemes import Scheme
from sparcel.training.policy import Policy, Treatment


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


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Return the device of the first tensor, before `check_device` looks at all of them."""
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def check_device(tensors: Mapping[str, Tensor], comm: Communicator) -> torch.device:
    """Return the one device that all tensors are on, if the communicator reaches it.

    Raises
    ------
    InputError
        When there are no tensors, or they hold no floats, or they are on several devices or another
        type of device.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise InputError(
                f"tensors must hold floats to be averaged, {name!r} has {tensor.dtype}"
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


def check_alike(
    everyone: Communicator,
    comm: Communicator,
    scheme: Scheme,
    settings: tuple[object, ...],
    treatment: Treatment,
) -> None:
    """Compare what the ranks average, because ranks that differ would hang or misread each other.

    Parameters
    ----------
    everyone, comm
        See `Session`: the shapes of shards are the same on the ranks that average them.
    scheme, settings
        The scheme, and whatever else the ranks must be told alike.

    Raises
    ------
    MismatchError
        On all ranks, when schemes, settings or tensors differ.
    """
    layout = [
        (name, tensor.dtype, name in treatment.eligible, name in treatment.rows)
        for name, tensor in treatment.tensors.items()
    ]
    shapes = [tensor.shape for tensor in treatment.tensors.values()]
    densities = sorted(treatment.own_densities.items())
    same = repr((scheme, settings, layout, densities, treatment.scope))
    others = _ranks_with_other(same, everyone) + _ranks_with_other(repr(shapes), comm)
    if any(everyone.run(lambda: everyone.gather_numbers(len(others)))):
        found = f"ranks {others} average" if others else "ranks of another shard average"
        raise MismatchError(
            f"{found} something else than rank {comm.rank}, which has {scheme}"
            f" for {len(treatment.tensors)} tensors, {len(treatment.small)} of them small, and"
            f" scope {treatment.scope!r}; give every rank the same scheme, settings, policy,"
            " densities, scope, carrier and tensors, and a scaler and rates to all or to none"
        )


def check_switch(before: Scheme, after: Scheme) -> None:
    """Raise `InputError` unless what one scheme remembers means the same to another."""
    if before.momentum != after.momentum:
        raise InputError(
            f"{before} corrects momentum={before.momentum:g}, and {after} corrects"
            f" {after.momentum:g}: memory is a sum of velocities or of gradients, and the"
            " optimiser's momentum has to fit; switch between schemes of the same momentum"
        )


def check_nodes(scheme: Scheme, comm: Communicator) -> None:
    """Connect the nodes that a scheme needs; all ranks call.

    Raises
    ------
    InputError
        On all ranks, when nodes have different numbers of ranks. Others can be asked for then:
        only an error that leaves a job ends the communicator.
    """

    def connect() -> InputError | None:
        try:
            scheme.connect(comm)
        except InputError as error:
            return error
        return None

    if (refusal := comm.run(connect)) is not None:
        raise refusal


def check_rates(comm: Communicator) -> None:
    """Raise `MismatchError` on all ranks unless their communicators have the same rates."""
    assert comm.rates is not None, "they were given"
    if others := _ranks_with_other(comm.rates.to_json(), comm):
        raise MismatchError(
            f"ranks {others} have other rates than rank {comm.rank}; give all ranks the same file"
        )


def _ranks_with_other(facts: str, comm: Communicator) -> list[int]:
    """Return the ranks whose facts differ from this rank's; all ranks call."""
    digests = comm.run(lambda: comm.gather_numbers(digest(facts, 56)))
    return [rank for rank, other in enumerate(digests) if other != digests[comm.rank]]


def check_vector(vector: Tensor, places: Mapping[str, Range]) -> None:
    """Raise `InputError` unless a vector is flat and contiguous, and places are a mapping."""
    check_type(vector, Tensor, "vector")
    check_type(places, Mapping, "places")
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
    tensor, in_rows = treatment.tensors[name], name in treatment.rows
    if (gradient.shape, gradient.dtype, gradient.device, gradient.is_sparse) != (
        tensor.shape,
        tensor.dtype,
        tensor.device,
        in_rows,
    ):
        raise InputError(
            f"the gradient {name!r} must be {'sparse' if in_rows else 'dense'} {tensor.dtype}"
            f" of shape {tuple(tensor.shape)} on {tensor.device}, got"
            f" {'sparse' if gradient.is_sparse else 'dense'} {gradient.dtype} of shape"
            f" {tuple(gradient.shape)} on {gradient.device}; name sparse gradients in rows="
        )
