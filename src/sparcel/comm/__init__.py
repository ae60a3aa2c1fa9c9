"""Communicators: what carries messages between ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from sparcel.comm.base import Communicator, Handle, Traffic
from sparcel.comm.process_group import TorchCommunicator, connect
from sparcel.comm.simulated import Report, SimulatedCommunicator, simulate
from sparcel.comm.timing import Network
from sparcel.errors import InputError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Communicator",
    "Group",
    "Handle",
    "Network",
    "Report",
    "SimulatedCommunicator",
    "TorchCommunicator",
    "Traffic",
    "resolve",
    "simulate",
]


Group: TypeAlias = "Communicator | dist.ProcessGroup | MPI.Intracomm | None"
"""What every ``group=`` argument takes; None is torch.distributed's default group."""


def resolve(group: Group = None) -> Communicator:
    """Return the communicator that a ``group=`` argument means.

    Parameters
    ----------
    group
        A communicator of sparcel's, which is returned as it is; a torch.distributed process
        group, or None for the default one; or an MPI communicator of mpi4py's. All its ranks
        call. The communicator of a group is made once and kept until it is closed, dead or
        alive: after a failure all ranks call ``resolve(group).close()``, and the next use connects
        anew.

    Raises
    ------
    InputError
        When ``group`` is something else, or there is no default process group.
    CommunicationError
        When not all ranks came within the process group's timeout, or 300 s on MPI.
    """
    if isinstance(group, Communicator):
        return group
    if group is None or isinstance(group, dist.ProcessGroup):
        return connect(group)
    mpi = sys.modules.get("mpi4py.MPI")  # whoever passes a communicator of its has imported it
    if mpi is not None and isinstance(group, mpi.Comm):
        from sparcel.comm.mpi import connect as connect_mpi

        return connect_mpi(group)
    other: object = group
    if other is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError("this process is not in the group; only its members can use it")
    raise InputError(
        "group must be a torch.distributed process group, None for the default one, an MPI "
        f"communicator of mpi4py's, or a communicator from sparcel.comm, got {group!r}"
    )
