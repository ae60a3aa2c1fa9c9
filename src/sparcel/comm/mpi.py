"""The communicator over MPI, by mpi4py (the extra ``mpi``).

Importing this starts MPI, as ``from mpi4py import MPI`` does.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Self

from mpi4py import MPI
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub leaves it out
from torch.distributed.distributed_c10d import PrefixStore, Store

from sparcel.comm.connected import ConnectedCommunicator
from sparcel.comm.engine import expecting
from sparcel.comm.lifeline import Lifeline
from sparcel.comm.mpi_engine import MpiEngine
from sparcel.comm.mpi_exit import MpiFate, remember
from sparcel.comm.sockets import is_loopback, own_address
from sparcel.errors import InputError

TIMEOUT_SECONDS = 300.0
"""What exchanges may take where nothing else is said."""

_PADDED_BYTES = 4096
"""Messages of at most that many bytes are padded to one length, as MPI's all-gather wants them."""

_NAME_BYTES, _ANSWER_BYTES = 64, 512
"""What host names, and rank 0's answer where its store is, are padded to."""

_NONE = "none"
"""What rank 0 answers in place of a host, before the reason."""

_POLL_SECONDS = 0.0005
"""How often to look whether all ranks have come to a meeting."""


@dataclass(frozen=True)
class MpiMeeting:
    """Where the ranks of a communicator meet, the same for all but ``rank``.

    Attributes
    ----------
    comm
        An MPI communicator that nothing else uses.
    store
        A store under a prefix that no other communicator has, where ranks tell why they failed.
    members
        What errors call the ranks: their numbers in ``MPI.COMM_WORLD``.
    rank
        Index of this process in ``members``.
    timeout
        Seconds after which an exchange that hangs raises.
    family
        The MPI communicators of all that was split from one another, the first one first.
    keeps_store
        Whether the store is this process's.
    """

    comm: MPI.Intracomm
    store: Store
    members: list[int]
    rank: int
    timeout: float
    family: list[MPI.Intracomm]
    keeps_store: bool

    @classmethod
    def of(cls, comm: MPI.Intracomm, timeout: float) -> Self:
        """Agree with the other ranks of ``comm``; all call.

        Raises
        ------
        InputError
            When ``comm`` is null or an intercommunicator, ``timeout`` is not positive, or MPI
            does not take calls from several threads.
        CommunicationError
            When not all ranks came within ``timeout`` seconds.
        """
        _check(comm, timeout)
        members = _names(comm)
        own, meeting = comm.Idup()
        with expecting(members[comm.rank], members):
            _await(meeting, timeout)
            own.Set_errhandler(MPI.ERRORS_RETURN)
            store = _store(own, timeout)
        return cls(own, store, members, comm.rank, timeout, [own], comm.rank == 0)

    def engine(self) -> MpiEngine:
        """Connect to the other ranks.

        Raises
        ------
        CommunicationError
            When not all ranks came within the timeout.
        """
        with expecting(self.members[self.rank], self.members):
            store, size = PrefixStore("lifeline", self.store), len(self.members)
            lifeline = Lifeline(store, self.rank, size, self.timeout)
        return MpiEngine(self.comm, lifeline, self.members, self.rank, self.timeout)

    def fate(self) -> MpiFate:
        """Return the end that the ranks share."""
        whole = self.comm is self.family[0]
        comms = self.family if whole else [self.comm]
        return MpiFate(self.store, len(self.members), comms, self.timeout, self.keeps_store)

    def part(self, ranks: list[int], label: str) -> Self:
        """Return where these ranks meet; they have just heard from each other."""
        comm = self.comm.Create_group(self.comm.group.Incl(ranks))
        self.family.append(comm)
        return replace(
            self,
            comm=comm,
            store=PrefixStore(label, self.store),
            members=[self.members[rank] for rank in ranks],
            rank=ranks.index(self.rank),
        )


class MpiCommunicator(ConnectedCommunicator):
    """Ranks of an MPI communicator, on a duplicate of it, so that messages never mix.

    `sparcel.comm.resolve` makes one where it is given an MPI communicator; make it with `of` for
    another timeout.
    """

    @classmethod
    def of(cls, comm: MPI.Intracomm, timeout: float = TIMEOUT_SECONDS) -> Self:
        """Connect the ranks of an MPI communicator, all of which call.

        Parameters
        ----------
        comm
            ``MPI.COMM_WORLD``, or any part of it.
        timeout
            Seconds after which an exchange that hangs raises, the same on all ranks.

        Raises
        ------
        InputError
            When ``comm`` is null or an intercommunicator, ``timeout`` is not positive, or MPI
            does not take calls from several threads.
        CommunicationError
            When not all ranks came within ``timeout`` seconds.
        """
        connected = cls(MpiMeeting.of(comm, timeout))
        assert isinstance(connected._fate, MpiFate), "as MpiMeeting makes it"
        remember(connected._fate)
        return connected

    def gather(self, message: Tensor, at_most: int) -> list[Tensor]:
        """See `Communicator.gather`; small messages go by MPI's own all-gather."""
        if at_most > _PADDED_BYTES:
            return super().gather(message, at_most)

        def job() -> list[Tensor]:
            assert isinstance(self.engine, MpiEngine), "as MpiMeeting makes it"
            messages = self.engine.gather(message, at_most)
            self.traffic.count_gather(message, messages)
            return messages

        return self.run(job)


def connect(comm: MPI.Intracomm) -> MpiCommunicator:
    """Return the communicator of an MPI communicator, the same one each time until it is closed.

    It lives as long as ``comm``. One that died of a failure is no exception: when all ranks have
    closed theirs, they connect anew.
    """
    if comm == MPI.COMM_NULL:
        raise InputError("this process is not in the MPI communicator; only its members can use it")
    known = comm.Get_attr(_ATTRIBUTE)
    if not isinstance(known, MpiCommunicator) or known.closed:
        known = MpiCommunicator.of(comm)
        comm.Set_attr(_ATTRIBUTE, known)
    return known


_ATTRIBUTE = MPI.Comm.Create_keyval()


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
    """Return the numbers of the ranks in the world, or in ``comm`` where some are not in it."""
    ranks = list(range(comm.size))
    world = comm.group.Translate_ranks(ranks, MPI.COMM_WORLD.group)
    return ranks if MPI.UNDEFINED in world else list(world)


def _await(request: MPI.Request, timeout: float) -> None:
    """Wait for what all ranks take part in; `TimeoutError` when they do not."""
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s")
        time.sleep(_POLL_SECONDS)


def _store(comm: MPI.Intracomm, timeout: float) -> TCPStore:
    """Return a store that rank 0 keeps for the ranks; where it cannot, all raise `OSError`."""
    limit, store, answer = timedelta(seconds=timeout), None, bytearray(_ANSWER_BYTES)
    name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
    names = bytearray(_NAME_BYTES * comm.size)
    _await(comm.Iallgather([name, MPI.BYTE], [names, MPI.BYTE]), timeout)
    if comm.rank == 0:
        try:
            host = _host(alone=names == name * comm.size)
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            text = f"{host} {store.port}"
        except (OSError, RuntimeError) as error:
            text = f"{_NONE} {error}"
        answer[:] = text.encode()[:_ANSWER_BYTES].ljust(_ANSWER_BYTES)
    _await(comm.Ibcast([answer, MPI.BYTE]), timeout)
    host, rest = answer.decode(errors="replace").rstrip().split(" ", 1)
    if host == _NONE:
        raise OSError(rest)
    return store or TCPStore(host, int(rest), is_master=False, timeout=limit)


def _host(alone: bool) -> str:
    """Return where the ranks find this process, which are ``alone`` on one machine, or not."""
    host = own_address()
    if is_loopback(host) and not alone and not os.environ.get("GLOO_SOCKET_IFNAME"):
        raise OSError(
            f"no network leads from rank 0's machine to the others; found {host} alone: name the"
            " interface to use in GLOO_SOCKET_IFNAME"
        )
    return host
