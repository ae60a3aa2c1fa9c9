"""The communicator over MPI, by mpi4py (the extra ``mpi``).

Importing this starts MPI, as ``from mpi4py import MPI`` does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Self

from mpi4py import MPI

from sparcel.comm.connected import ConnectedCommunicator
from sparcel.comm.mpi_engine import MpiEngine, MpiFate
from sparcel.errors import CommunicationError, InputError

TIMEOUT_SECONDS = 300.0
"""What exchanges may take where nothing else is said."""

_POLL_SECONDS = 0.0005
"""How often to look whether all ranks have come to a meeting."""


@dataclass(frozen=True)
class MpiMeeting:
    """Where the ranks of a communicator meet, the same for all but ``rank``.

    Attributes
    ----------
    comm
        An MPI communicator that nothing else uses.
    members
        What errors call the ranks: their numbers in ``MPI.COMM_WORLD``.
    rank
        Index of this process in ``members``.
    timeout
        Seconds after which an exchange that hangs raises.
    end
        The end that the family shares.
    """

    comm: MPI.Intracomm
    members: list[int]
    rank: int
    timeout: float
    end: MpiFate

    @classmethod
    def of(cls, comm: MPI.Intracomm, timeout: float) -> Self:
        """Agree with the other ranks of ``comm``; all call.

        Raises
        ------
        InputError
            When ``comm`` is null or an intercommunicator, or MPI does not take calls from
            several threads.
        CommunicationError
            When not all ranks came within ``timeout`` seconds.
        """
        _check(comm, timeout)
        members = [int(name) for name in _names(comm)]
        own = _duplicate(comm, members, timeout)
        return cls(own, members, comm.rank, timeout, MpiFate(own, members))

    def engine(self) -> MpiEngine:
        """Return what carries the messages."""
        return MpiEngine(self.comm, self.members, self.rank, self.timeout, self.end)

    def fate(self) -> MpiFate:
        """Return the end that the ranks share."""
        return self.end if self.end.comm == self.comm else MpiFate(self.comm, self.members)

    def part(self, ranks: list[int], label: str) -> Self:
        """Return where these ranks meet; MPI tells parts apart without the ``label``."""
        return replace(
            self,
            comm=self.comm.Create_group(self.comm.group.Incl(ranks)),
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
        return cls(MpiMeeting.of(comm, timeout))


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


def _duplicate(comm: MPI.Intracomm, members: list[int], timeout: float) -> MPI.Intracomm:
    own, meeting = comm.Idup()
    deadline = time.monotonic() + timeout
    while not meeting.Test():
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"rank {members[comm.rank]} waited {timeout:g} s for ranks"
                f" {[m for m in members if m != members[comm.rank]]} to connect, which must all be"
                " alive and connect at about the same time"
            )
        time.sleep(_POLL_SECONDS)
    own.Set_errhandler(MPI.ERRORS_RETURN)
    return own
