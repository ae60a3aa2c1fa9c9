"""The way that tensors of a GPU take between the ranks."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist

from sparcel.comm import Communicator, Group, TorchCommunicator, carry, resolve
from sparcel.device import GPUS
from sparcel.errors import InputError, checked_name

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
