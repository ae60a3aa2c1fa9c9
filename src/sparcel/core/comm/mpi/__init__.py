"""The communicator over MPI, by mpi4py (the extra ``mpi``).

Importing this starts MPI, as ``from mpi4py import MPI`` does.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from mpi4py import MPI
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub leaves it out
from torch.distributed.distributed_c10d import PrefixStore
from typing_extensions import override

from sparcel.core.comm.communicator import exchanging
from sparcel.core.comm.connected import ConnectedCommunicator, Rendezvous, connecting
from sparcel.core.comm.mpi.engine import MpiEngine, abandoned
from sparcel.core.comm.mpi.shutdown import MpiFailure, exit_after_failure, watch_at_exit
from sparcel.core.comm.sockets import LOOPBACK, address_of_interface, address_towards
from sparcel.errors import InputError

_TIMEOUT_SECONDS = 300.0

_PADDED_BYTES = 4096
"""Up to this bound, messages are padded to one length, as MPI's all-gather requires."""


class MpiCommunicator(ConnectedCommunicator):
    """Ranks of an MPI communicator.

    Messages travel on a duplicate of that communicator, so they never mix with the program's own.
    `sparcel.comm.resolve` makes one of an MPI communicator; `of` makes one with another timeout.
    """

    engine: MpiEngine
    _failure: MpiFailure

    @classmethod
    def of(cls, comm: MPI.Intracomm, timeout: float = _TIMEOUT_SECONDS) -> Self:
        """Connect the ranks of an MPI communicator, all of which call.

        Parameters
        ----------
        comm
            ``MPI.COMM_WORLD``, or any other intracommunicator.
        timeout
            Seconds after which a hanging exchange raises, equal on all ranks.

        Raises
        ------
        InputError
            When ``comm`` is null or an intercommunicator, ``timeout`` is not positive, or MPI
            was started without support for threads.
        CommunicationError
            When some rank does not connect within ``timeout`` seconds.
        """
        connected = cls(MpiRendezvous.of(comm, timeout))
        watch_at_exit(connected._failure, connected._executor)
        return connected

    @exchanging
    def gather_parts(
        self, parts: Sequence[Tensor], at_most: int, control: int
    ) -> list[Sequence[Tensor]]:
        """See `Communicator.gather_parts`; MPI's own all-gather carries small messages."""
        if at_most > _PADDED_BYTES:
            return super().gather_parts(parts, at_most, control)
        messages = self.engine.gather(parts, at_most, self.calls.fingerprint)
        lengths = [other.numel() for other in messages]
        own = lengths.pop(self.rank)
        self.traffic.count([own] * len(lengths), lengths)
        return [[message] for message in messages]


def connect(comm: MPI.Intracomm) -> MpiCommunicator:
    """Return the communicator of an MPI communicator, and keep it as long as ``comm`` lives.

    See `sparcel.comm.resolve`.
    """
    if comm == MPI.COMM_NULL:
        raise InputError("this process is not in the MPI communicator; only its members can use it")
    known = comm.Get_attr(_ATTRIBUTE)
    if not isinstance(known, MpiCommunicator) or known.closed:
        known = MpiCommunicator.of(comm)
        comm.Set_attr(_ATTRIBUTE, known)
    return known


_ATTRIBUTE = MPI.Comm.Create_keyval()


_ANSWER_BYTES = 512
"""Padded length of rank 0's answer where its store is."""

_NONE = "none"
"""What rank 0 answers in place of a host, before the reason, if it has no store."""

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no machine (RFC 5737, RFC 3849); the route to them leads off this machine."""

_POLL_SECONDS = 0.0005
"""How often to check whether all ranks have come."""


@dataclass(frozen=True)
class MpiRendezvous(Rendezvous):
    """Where the ranks of an MPI communicator meet; errors name them by ``MPI.COMM_WORLD``'s ranks.

    Attributes
    ----------
    comm
        An MPI communicator that nothing else uses.
    address
        The address at which this process listens for the others: that of the interface which
        leads to the store, or of the one in ``GLOO_SOCKET_IFNAME``.
    comms
        The first communicator and all that were split from it or from one another, in order of
        creation; all rendezvous of these communicators share the list.
    """

    comm: MPI.Intracomm
    address: str
    comms: list[MPI.Intracomm]

    @classmethod
    def of(cls, comm: MPI.Intracomm, timeout: float) -> Self:
        """Agree with the other ranks of ``comm``; all call. Raises as `MpiCommunicator.of`."""
        _check(comm, timeout)
        members = _names(comm)
        own, duplicated = comm.Idup()
        with connecting(members[comm.rank], members):
            _wait(duplicated, timeout)
            own.Set_errhandler(MPI.ERRORS_RETURN)
            store = _store(own, timeout)
            address = address_of_interface() or address_towards(store.host)
        return cls(store, members, comm.rank, timeout, own, address, [own])

    @override
    def engine(self) -> MpiEngine:
        store = PrefixStore("idle", self.store)
        return MpiEngine(self.comm, store, self.members, self.rank, self.timeout, self.address)

    @override
    def failure(self) -> MpiFailure:
        # Closing the first communicator closes all others. So it frees all of them, and its end is
        # the one that the process with the store waits for.
        first = self.comm is self.comms[0]
        comms, hosts_store = self.comms if first else [self.comm], first and self.rank == 0
        return MpiFailure(self.store, len(self.members), comms, self.timeout, hosts_store)

    @override
    def subgroup(self, ranks: list[int], label: str) -> Self:
        comm = self.comm.Create_group(self.comm.group.Incl(ranks))
        self.comms.append(comm)
        return replace(super().subgroup(ranks, label), comm=comm)


def _check(comm: MPI.Intracomm, timeout: float) -> None:
    if comm == MPI.COMM_NULL or comm.is_inter:
        raise InputError(
            f"group must be an MPI intracommunicator that this process belongs to, got {comm}"
        )
    if not timeout > 0:
        raise InputError(f"timeout must be more than 0 seconds, got {timeout}")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise InputError(
            "MPI was started without support for threads, which async_op=True needs: leave"
            " mpi4py.rc.thread_level at 'multiple', and use an MPI that provides it"
        )


def _names(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks in the world, or those in ``comm`` if some are not in this world."""
    ranks = list(range(comm.size))
    world = comm.group.Translate_ranks(ranks, MPI.COMM_WORLD.group)
    return ranks if MPI.UNDEFINED in world else list(world)


def _wait(request: MPI.Request, timeout: float, *used: bytearray) -> None:
    """Wait for a request in which all ranks take part; raises `TimeoutError`."""
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            abandoned.append((request, used))
            raise TimeoutError(f"not within {timeout:g} s")
        time.sleep(_POLL_SECONDS)


def _store(comm: MPI.Intracomm, timeout: float) -> TCPStore:
    """Return a store that rank 0 hosts; if rank 0 cannot, all ranks raise `OSError`."""
    limit, store, answer = timedelta(seconds=timeout), None, bytearray(_ANSWER_BYTES)
    machine = _machine()
    machines = bytearray(len(machine) * comm.size)
    _wait(comm.Iallgather([machine, MPI.BYTE], [machines, MPI.BYTE]), timeout, machines)
    if comm.rank == 0:
        try:
            host = _host(one_machine=machines == machine * comm.size)
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            text = f"{host} {store.port}"
        except (OSError, RuntimeError) as error:
            text = f"{_NONE} {error}"
        answer[:] = text.encode()[:_ANSWER_BYTES].ljust(_ANSWER_BYTES)
    _wait(comm.Ibcast([answer, MPI.BYTE]), timeout, answer)
    host, rest = answer.decode(errors="replace").rstrip().split(" ", 1)
    if host == _NONE:
        raise OSError(rest)
    return store or TCPStore(host, int(rest), is_master=False, timeout=limit)


def _machine() -> bytes:
    """Return what is equal for processes that reach each other over loopback, and for no others."""
    parts = [socket.gethostname()]
    if sys.platform == "linux":
        try:
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
            parts.append(os.readlink("/proc/self/ns/net"))
        except OSError:  # containers may share a hostname, so it alone proves nothing
            return os.urandom(hashlib.sha256().digest_size)
    return hashlib.sha256(" ".join(parts).encode()).digest()


def _host(one_machine: bool) -> str:
    """Return an address at which the ranks, which may all be on one machine, reach this process."""
    named = address_of_interface()
    if named or one_machine:
        return named or LOOPBACK
    for elsewhere in _ELSEWHERE:
        with suppress(OSError):
            address = address_towards(elsewhere)
            if not ip_address(address).is_loopback:
                return address
    raise OSError(
        "rank 0's machine has no route to the other machines; name the interface to use in"
        " GLOO_SOCKET_IFNAME"
    )


__all__ = ["MpiCommunicator", "connect", "exit_after_failure"]
