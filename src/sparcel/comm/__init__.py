"""Communicators: what carries messages between ranks."""

from __future__ import annotations

from typing import TypeAlias

import torch.distributed as dist

from sparcel.comm.base import Communicator, Handle, Traffic
from sparcel.comm.simulated import Report, SimulatedCommunicator, simulate
from sparcel.errors import InputError

__all__ = [
    "Communicator",
    "Group",
    "Handle",
    "Report",
    "SimulatedCommunicator",
    "Traffic",
    "resolve",
    "simulate",
]

Group: TypeAlias = "Communicator | dist.ProcessGroup | None"


def resolve(group: Group) -> Communicator:
    """Return the communicator for what a user calls a group."""
    if isinstance(group, Communicator):
        return group
    raise InputError(f"group must be a sparcel communicator, got {type(group).__name__}")
