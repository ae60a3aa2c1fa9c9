"""The communicator over MPI, by mpi4py (the extra ``mpi``).

Importing this starts MPI, as ``from mpi4py import MPI`` does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Self

from mpi4py import MPI
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub leaves it out
from torch.distributed.distributed_c10d import PrefixStore, Store

from sparcel.comm import mpi_exit
from sparcel.comm.connected import ConnectedCommunicator
from sparcel.comm.fate import StoreFate
from sparcel.comm.lifeline import Lifeline
from sparcel.comm.mesh import own_address
from sparcel.comm.mpi_engine import MpiEngine
from sparcel.errors import CommunicationError, InputError

TIMEOUT_SECONDS = 300.0
"""What exchanges may take where nothing else is said."""

_PADDED_BYTES = 4096
"""Messages of at most that many bytes are padded to one length, as MPI's all-gather wants them."""

_ADDRESS_BYTES = 256

_POLL_SECONDS = 0.0005
"""How often to look whether all ranks have come to a meeting."""


class MpiFate(StoreFate):
    """The end of a group of MPI ranks.

    Parameters
    ----------
    store, size
        As for `StoreFate`.
    comms
        What to free once all ranks are done with it. Where they have failed it never is: MPI would
        use its number again, for which messages may wait that nobody received.
    """

    def __init__(self, store: Store, size: int, comms: list[MPI.Intracomm]) -> None:
        super().__init__(store, size)
        self._comms = comms

    def part(self, patience: float) -> bool:
        """See `Fate.part`."""
        done = super().part(patience)
        for comm in self._comms:
            if done and comm != MPI.COMM_NULL:
                comm.Free()
        return done


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
    """

    comm: MPI.Intracomm
    store: Store
    members: list[int]
    rank: int
    timeout: float
    family: list[MPI.Intracomm]

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
        with _meeting(comm.rank, members):
            _await(meeting, timeout)
            own.Set_errhandler(MPI.ERRORS_RETURN)
            store = _store(own, timeout)
        return cls(own, store, members, comm.rank, timeout, [own])

    def engine(self) -> MpiEngine:
        """Connect to the other ranks.

        Raises
        ------
        CommunicationError
            When not all ranks came within the timeout.
        """
        with _meeting(self.rank, self.members):
            store, size = PrefixStore("lifeline", self.store), len(self.members)
            lifeline = Lifeline(store, self.rank, size, self.timeout)
        return MpiEngine(self.comm, lifeline, self.members, self.rank, self.timeout)

    def fate(self) -> MpiFate:
        """Return the end that the ranks share."""
        whole = self.comm is self.family[0]
        return MpiFate(self.store, len(self.members), self.family if whole else [self.comm])

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
        mpi_exit.remember(connected._fate)
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
    """Return a store that rank 0 keeps for the ranks."""
    limit, store = timedelta(seconds=timeout), None
    address = bytearray(_ADDRESS_BYTES)
    if comm.rank == 0:
        host = own_address()
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        address[:] = f"{host} {store.port}".encode().ljust(_ADDRESS_BYTES)
    _await(comm.Ibcast([address, MPI.BYTE]), timeout)
    if store is None:
        host, port = address.decode().split()
        store = TCPStore(host, int(port), is_master=False, timeout=limit)
    return store


@contextmanager
def _meeting(rank: int, members: list[int]) -> Iterator[None]:
    """Turn what is raised when ranks do not come into `CommunicationError`."""
    try:
        yield
    except (RuntimeError, OSError, MPI.Exception) as error:
        me = members[rank]
        others = [member for member in members if member != me]
        raise CommunicationError(
            f"rank {me} could not connect to ranks {others}, which must all be alive and connect"
            f" at about the same time: {error}"
        ) from error
