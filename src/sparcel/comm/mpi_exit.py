"""How ranks part that share MPI, and how a process ends whose MPI does not work any more.

MPI_Finalize waits for all processes, and where one is dead it hangs, or ends the process with a
status of its own. One cannot leave it out alone, so all ranks of a group that failed do.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from mpi4py import MPI
from torch.distributed.distributed_c10d import Store

from sparcel.comm.family import at_last
from sparcel.comm.fate import StoreFate, bounded

_LINGER_SECONDS = 1.0
"""How long the other ranks may still ask for the cause, which one of the processes keeps."""

_POLL_SECONDS = 0.005
"""How often to look at what others have said."""

_TELL_SECONDS = 2.0
"""How long it may take to tell others something; who keeps the store may be gone."""


class MpiFate(StoreFate):
    """The end of a group of MPI ranks.

    Parameters
    ----------
    store, size
        As for `StoreFate`.
    comms
        What to free once all ranks are done with it. Where they have failed it never is: MPI would
        use its number again, for which messages may wait that nobody received.
    timeout
        Seconds to wait for the other ranks when the process ends.
    keeps_store
        Whether the store ends with this process.
    """

    def __init__(
        self,
        store: Store,
        size: int,
        comms: list[MPI.Intracomm],
        timeout: float,
        keeps_store: bool,
    ) -> None:
        super().__init__(store, size)
        self._comms, self._timeout, self._keeps_store = comms, timeout, keeps_store
        self.parted: bool | None = None
        """Whether all ranks were done when this one was; None before."""

    def part(self, patience: float) -> bool:
        """See `Fate.part`."""
        self.parted = super().part(patience)
        if self.parted:
            self._hear()
            for comm in self._comms:
                if comm != MPI.COMM_NULL and not MPI.Is_finalized():
                    with suppress(MPI.Exception):  # it costs a number, and is no failure
                        comm.Free()
        return self.parted

    def ended_well(self) -> bool:
        """Tell, when the process ends, whether all ranks were done and MPI_Finalize can be called.

        A rank that was done long before others waits for them here, as it would there; those that
        leave MPI_Finalize out say so.
        """
        if self.parted:
            return True
        if self.parted is False:
            self.parted = bounded(self._await_others, self._timeout)
        if self.parted:
            self._hear()
        else:
            bounded(lambda: self._store.set("failed", ""), _TELL_SECONDS)
        return bool(self.parted)

    def _part(self, patience: float) -> bool:
        return super()._part(patience) and not self._store.check(["failed"])

    def _await_others(self) -> bool:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline and not self._store.check(["failed"]):
            if self._store.add("done", 0) == self._size:
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _hear(self) -> None:
        """Say that this rank knows all to be done; who keeps the store stays until all know."""

        def hear() -> None:
            heard = self._store.add("heard", 1)
            deadline = time.monotonic() + _TELL_SECONDS
            while self._keeps_store and heard < self._size and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                heard = self._store.add("heard", 0)

        bounded(hear, _TELL_SECONDS)


_fates: list[MpiFate] = []
"""Of the families that have connected; those that have ended are gone once another connects."""


def remember(fate: MpiFate) -> None:
    """Look at this end when the interpreter exits."""
    _fates[:] = [known for known in _fates if known.cause is None and not known.parted] + [fate]


def _leave() -> None:
    """End the process here where MPI_Finalize would hang.

    What status the interpreter was about to exit with is nowhere to be known, but that a group
    failed is, and so it is a failure's.
    """
    failed = [fate for fate in _fates if not fate.ended_well()]
    if not failed or MPI.Is_finalized():
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it
            stream.flush()
    time.sleep(_LINGER_SECONDS)
    os._exit(1)


at_last.append(_leave)
