"""The ranks of an exchange: how they are connected, what each holds, and whether they agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.core import cost
from sparcel.core._checks import FLOAT_DTYPES
from sparcel.core.comm import (
    Call,
    Communicator,
    Group,
    TorchCommunicator,
    carry,
    ranks_with_other,
    resolve,
)
from sparcel.core.device import GPUS
from sparcel.core.rates import Rates
from sparcel.core.schemes import Scheme
from sparcel.core.training.policy import Treatment
from sparcel.errors import InputError, MismatchError, checked_name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Carrier: TypeAlias = Literal["host", "nccl"]
"""What carries tensors of a GPU."""


def connected(
    group: Group, device: torch.device, carrier: Carrier
) -> tuple[Communicator, Communicator | None]:
    """Return the communicator to use, and again if it is made here and has to be closed.

    Raises
    ------
    InputError
        For a carrier that does not exist, or NCCL for tensors on the CPU.
    """
    checked_name(carrier, get_args(Carrier), "carrier")
    on_gpu = device.type in GPUS
    if carrier == "nccl" and not on_gpu:
        raise InputError(
            f"carrier='nccl' is for tensors on a GPU of CUDA, and these are on {device}; leave it"
            " out"
        )
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return resolve(group, device), None
    place = (device if carrier == "nccl" else torch.device("cpu")) if on_gpu else None
    owned = carry(TorchCommunicator.of(group, place), device)
    return owned, owned


def check_carrier(carrier: Carrier, comm: Communicator) -> None:
    """Raise `InputError` unless a communicator takes the way that was asked for, if any was."""
    if carrier == "nccl" and comm.carrier != "NCCL":
        raise InputError(
            f"carrier='nccl' needs a process group with NCCL, and the ranks are connected by"
            f" {comm.carrier}; make it by init_process_group('nccl'), or leave carrier out"
        )
    if carrier == "host" and comm.carrier == "NCCL":
        raise InputError(
            "this communicator has connections of NCCL; pass carrier='nccl' to use them, or its"
            " process group as group= to go by way of the host"
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


@dataclass(frozen=True, eq=False)
class Shard:
    """The shard of all tensors that this rank holds, where no rank holds them whole.

    Attributes
    ----------
    number
        Ranks with the same number hold the same shard, and average it. Steps take effect on the
        ranks of all numbers, or on none.
    tensors
        The whole tensors, by name.
    copied
        The names of tensors that ranks of other shards hold as well, as under tensor parallelism.
        They are averaged densely: each of these ranks would select for itself.
    """

    number: int
    tensors: Mapping[str, DTensor]
    copied: frozenset[str] = frozenset()

    def distributed(self, name: str, part: Tensor) -> DTensor:
        """Return the tensor of which ``part``, flat, is this rank's shard."""
        from torch.distributed.tensor import DTensor

        like = self.tensors[name]
        shape = like.to_local().shape
        return DTensor.from_local(
            part.view(shape),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def local(self, name: str, whole: object) -> object:
        """Return this rank's shard of a tensor that is sharded as the one of that name is.

        What is no DTensor is returned as it is.

        Raises
        ------
        InputError
            When it is sharded otherwise.
        """
        from torch.distributed.tensor import DTensor

        like = self.tensors[name]
        if not isinstance(whole, DTensor):
            return whole
        if (whole.shape, whole.placements) != (like.shape, like.placements):
            raise InputError(
                f"the state of {name!r} must be sharded as the parameter is, {tuple(like.shape)} by"
                f" {like.placements}, got {tuple(whole.shape)} by {whole.placements}; let"
                " torch.distributed.checkpoint load it into state_dict()"
            )
        return whole.to_local().flatten()


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks that exchange the tensors of a training, and what they ask one another.

    All ranks call each method but `close`.

    Attributes
    ----------
    comm
        The ranks that average the same tensors.
    everyone
        The ranks on which steps take effect together: ``comm``, or with shards the ranks of all
        shards.
    shard
        Which shard of the tensors this rank holds; None for all of them.
    owned
        What `close` ends: ``everyone``, if it was made for this exchange; else None.
    """

    comm: Communicator
    everyone: Communicator
    shard: Shard | None
    owned: Communicator | None

    def gather(self, what: str, number: int = 0, **facts: object) -> list[int]:
        """Return the numbers of all ranks, once all of them have made this very call.

        Raises
        ------
        MismatchError
            On all ranks, when they make different calls, or one with different facts.
        CommunicationError
            When a rank fails.
        """
        everyone = self.everyone
        return everyone.call(Call.of(what, facts), lambda: everyone.gather_numbers(number))

    def check_alike(
        self, scheme: Scheme, settings: tuple[object, ...], treatment: Treatment
    ) -> None:
        """Raise `MismatchError` on all ranks unless they average the same.

        Ranks that differ would hang or misread each other. ``settings`` are those that the scheme
        and the treatment do not tell. The shapes of shards are compared where they are the same.
        """
        layout = [
            (name, tensor.dtype, name in treatment.eligible, name in treatment.rows)
            for name, tensor in treatment.tensors.items()
        ]
        shapes = [tensor.shape for tensor in treatment.tensors.values()]
        densities = sorted(treatment.own_densities.items())
        same = repr((scheme, settings, layout, densities, treatment.scope))
        places = self._places()
        others = ranks_with_other(same, self.everyone)
        others += [places[rank] for rank in ranks_with_other(repr(shapes), self.comm)]
        others = sorted(set(others))
        if any(self.everyone.run(lambda: self.everyone.gather_numbers(len(others)))):
            found = f"ranks {others} average" if others else "ranks of another shard average"
            raise MismatchError(
                f"{found} something else than rank {self.everyone.rank}, which has {scheme}"
                f" for {len(treatment.tensors)} tensors, {len(treatment.small)} of them small, and"
                f" scope {treatment.scope!r}; give every rank the same scheme, settings, policy,"
                " densities, scope, carrier and tensors, and a scaler and rates to all or to none"
            )

    def _places(self) -> list[int]:
        """Return which ranks of ``everyone`` those of ``comm`` are."""
        if self.shard is None:
            return list(range(self.comm.size))
        everyone, number = self.everyone, self.shard.number
        numbers = everyone.run(lambda: everyone.gather_numbers(number))
        return [rank for rank, one in enumerate(numbers) if one == number]

    def connect_nodes(self, scheme: Scheme) -> None:
        """Make the connections between nodes that a scheme needs.

        Raises
        ------
        InputError
            On all ranks, when nodes have different numbers of ranks. The ranks can go on: only an
            error that leaves a job ends the communicator.
        """
        refusals: list[InputError] = []

        def connect() -> None:
            try:
                scheme.connect(self.comm)
            except InputError as error:
                refusals.append(error)

        self.comm.run(connect)
        if refusals:
            raise refusals.pop()  # which refers to this call, and no variable of it to the error

    def take_rates(self, rates: Rates | str | PathLike[str]) -> None:
        """Give the communicators these rates, and raise `MismatchError` if ranks have others."""
        everyone = self.everyone
        found = cost.rates_for(everyone, rates)
        if others := ranks_with_other(found.to_json(), everyone):
            raise MismatchError(
                f"ranks {others} have other rates than rank {everyone.rank}; give all ranks the"
                " same file"
            )
        everyone.rates = found
        if self.shard is not None:  # ranks of other shards use the same links at the same time
            self.comm.rates = found.across_nodes()

    def close(self) -> None:
        """End the communicator if it was made for this exchange."""
        if self.owned is not None:
            self.owned.close()
