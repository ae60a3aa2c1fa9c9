"""The way that tensors of a GPU take between the ranks."""

from __future__ import annotations

from os import PathLike
from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist

from sparcel import cost
from sparcel.comm import Communicator, Group, TorchCommunicator, carry, resolve
from sparcel.device import GPUS
from sparcel.errors import InputError, known
from sparcel.rates import Rates

Carrier: TypeAlias = Literal["auto", "nccl", "host"]
"""What carries tensors of a GPU: NCCL, the host, or what is expected to suit the links."""

HOST_BANDWIDTH = 25.1e9 / 8
"""Bytes a second between nodes up to which ``"auto"`` takes the way by the host: 25 Gbit/s, and
room for rounding. An estimate: the host's memory copies several times as many, and messages there
need no sizes sent ahead."""


def connected(
    group: Group,
    device: torch.device,
    carrier: Carrier,
    rates: Rates | str | PathLike[str] | None,
) -> tuple[Communicator, Communicator | None]:
    """Return the communicator to use, and again if it is made here and has to be closed.

    Raises
    ------
    InputError
        For a carrier that does not exist, or one that is given for tensors on the CPU.
    """
    known(carrier, get_args(Carrier), "carrier")
    if carrier != "auto" and device.type not in GPUS:
        raise InputError(
            f"carrier={carrier!r} is for tensors on a GPU of CUDA, and these are on {device}; leave"
            " it out"
        )
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return resolve(group, device), None
    place = device if device.type in GPUS else None
    if carrier == "host" or (carrier == "auto" and place is not None and _are_slow(rates)):
        place = torch.device("cpu")
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
            "carrier='host' needs connections of the host, and this communicator has those of NCCL;"
            " give its process group as group="
        )


def _are_slow(rates: Rates | str | PathLike[str] | None) -> bool:
    """Tell whether these rates say that the links between nodes are slow enough for the host."""
    if rates is None or rates == "measure":
        return False
    if not isinstance(rates, Rates):
        try:
            rates = cost.read_rates(rates)
        except InputError:  # raised again once the ranks are connected; the others would wait now
            return False
    return rates.ranks > rates.ranks_per_node and rates.bandwidth <= HOST_BANDWIDTH
