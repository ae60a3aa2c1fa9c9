"""Communicators: they carry messages between ranks.

The modules here are shared by the rooms `torch`, `mpi` and `simulated`, one for each kind of
communicator. These rooms do not import one another.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from sparcel.core.comm.calls import Call, call_of, digest
from sparcel.core.comm.communicator import (
    DIRECT_RANKS,
    Communicator,
    Grid,
    gather_in_rounds,
    ranks_with_other,
)
from sparcel.core.comm.connected import ConnectedCommunicator as ConnectedCommunicator
from sparcel.core.comm.connected import Rendezvous as Rendezvous
from sparcel.core.comm.engine import ALL_CONTROL, Traffic, ring_bytes
from sparcel.core.comm.engine import Arrived as Arrived
from sparcel.core.comm.engine import Bounds as Bounds
from sparcel.core.comm.engine import Engine as Engine
from sparcel.core.comm.engine import Leaving as Leaving
from sparcel.core.comm.engine import LostPeerError as LostPeerError
from sparcel.core.comm.engine import PeerErrors as PeerErrors
from sparcel.core.comm.engine import Rows as Rows
from sparcel.core.comm.failure import Failure as Failure
from sparcel.core.comm.jobs import Job
from sparcel.core.comm.nodes import launched
from sparcel.core.comm.simulated import Network, Report, SimulatedCommunicator, simulate
from sparcel.core.comm.sockets import UnreachedError as UnreachedError
from sparcel.core.comm.sockets import address_of_interface as address_of_interface
from sparcel.core.comm.sockets import address_towards as address_towards
from sparcel.core.comm.staged import Staged, carry
from sparcel.core.comm.torch import TorchCommunicator
from sparcel.core.comm.torch import connect as connect_torch
from sparcel.errors import InputError, optional

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "ALL_CONTROL",
    "DIRECT_RANKS",
    "Call",
    "Communicator",
    "Grid",
    "Group",
    "Job",
    "Network",
    "Report",
    "SimulatedCommunicator",
    "Staged",
    "TorchCommunicator",
    "Traffic",
    "call_of",
    "carry",
    "digest",
    "gather_in_rounds",
    "launched",
    "ranks_with_other",
    "resolve",
    "resolve_or_alone",
    "ring_bytes",
    "simulate",
    "size_of",
    "world",
]


Group: TypeAlias = "Communicator | dist.ProcessGroup | MPI.Intracomm | None"
"""The type of every ``group=`` argument; None is torch.distributed's default group."""


def resolve(group: Group = None, device: torch.device | None = None) -> Communicator:
    """Return the communicator that a ``group=`` argument means.

    Parameters
    ----------
    group
        A sparcel communicator, which is returned as it is; a torch.distributed process group, or
        None for the default one; or an mpi4py communicator. All its ranks call. The communicator of
        a group is made once and kept until it is closed, even when it has failed. After a failure
        all ranks call ``resolve(group).close()``; the next use then connects anew.
    device
        Where the tensors to exchange are. Those of a GPU go over NCCL if the process group has it,
        and otherwise over the group's communicator by way of the host.

    Raises
    ------
    InputError
        When ``group`` is something else, or there is no default process group.
    CommunicationError
        When some rank does not connect within the process group's timeout, or within 300 s on MPI.
    """
    if isinstance(group, Communicator):
        return carry(group, device)
    if group is None or isinstance(group, dist.ProcessGroup):
        return carry(connect_torch(group, device), device)
    mpi = sys.modules.get("mpi4py.MPI")  # imported already if the group is an MPI communicator
    if mpi is not None and isinstance(group, mpi.Comm):
        from sparcel.core.comm.mpi import connect as connect_mpi

        return carry(connect_mpi(group), device)
    other: object = group
    if other is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError("this process is not in the group; only its members can use it")
    raise InputError(
        "group must be a torch.distributed process group, None for the default one, an MPI "
        f"communicator of mpi4py's, or a communicator from sparcel.comm, got {group!r}"
    )


def size_of(group: Group) -> int:
    """Return how many ranks a group has; those of a process group are not connected for it."""
    return group.size() if isinstance(group, dist.ProcessGroup) else resolve(group).size


def resolve_or_alone(group: Group) -> Communicator | None:
    """Return what `resolve` does; without any group, None for a process that was launched alone.

    Raises
    ------
    InputError
        When this process was launched with others, and neither a group nor a default one is given.
    """
    if group is not None or dist.is_initialized():
        return resolve(group)
    if launched():
        raise InputError(
            "this process was launched with others, and there is no process group yet; call"
            " torch.distributed.init_process_group first, or give group="
        )
    return None


def world() -> Communicator | None:
    """Return the communicator of all ranks that were launched together; None for a process alone.

    These are the ranks of torch.distributed's default group if there is one, those that torchrun
    started, which join a group of Gloo here, or those of MPI's world.
    """
    if not dist.is_initialized():
        engines = launched()
        if not engines:
            return None
        if "mpi" in engines:
            with optional("MPI", "mpi"):
                from mpi4py import MPI

            return resolve(MPI.COMM_WORLD) if MPI.COMM_WORLD.Get_size() > 1 else None
        dist.init_process_group("gloo")
    comm = resolve(None)
    return comm if comm.size > 1 else None
