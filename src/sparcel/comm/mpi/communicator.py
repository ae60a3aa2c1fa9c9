"""The communicator over MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from mpi4py import MPI
from torch import Tensor

from sparcel.comm.communicator import exchanging
from sparcel.comm.connected import ConnectedCommunicator
from sparcel.comm.mpi.engine import MpiEngine
from sparcel.comm.mpi.rendezvous import MpiRendezvous
from sparcel.comm.mpi.shutdown import MpiFailure, watch_at_exit
from sparcel.errors import InputError

_TIMEOUT_SECONDS = 300.0

_PADDED_BYTES = 4096
"""Up to this bound, messages are padded to one length, as MPI's all-gather requires."""


class MpiCommunicator(ConnectedCommunicator):
    """Ranks of an MPI communicator.

    Messages travel on a duplicate of that communicator, so they never mix with the program's own.
    `sparcel.comm.resolve` makes one of an MPI communicator; `of` makes one with another timeout.
    """

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
        assert isinstance(connected._failure, MpiFailure), "MpiRendezvous makes it"
        watch_at_exit(connected._failure, connected._executor)
        return connected

    @exchanging
    def gather_parts(
        self, parts: Sequence[Tensor], at_most: int, control: int
    ) -> list[Sequence[Tensor]]:
        """See `Communicator.gather_parts`; MPI's own all-gather carries small messages."""
        if at_most > _PADDED_BYTES:
            return super().gather_parts(parts, at_most, control)
        assert isinstance(self.engine, MpiEngine), "MpiRendezvous makes it"
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
