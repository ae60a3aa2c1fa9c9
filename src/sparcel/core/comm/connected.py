"""The communicator between processes, over whichever engine carries the bytes."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from typing_extensions import override

from sparcel.core.comm.communicator import Communicator, exchanging
from sparcel.core.comm.engine import Arrived, Bounds, Engine, Leaving, PeerErrors, Traffic
from sparcel.core.comm.executor import Executor
from sparcel.core.comm.failure import Failure
from sparcel.core.comm.jobs import CLOSED, Job, submit_beside
from sparcel.core.ops import Op
from sparcel.core.side_stream import SideStream, as_here
from sparcel.errors import CommunicationError


@dataclass(frozen=True)
class Rendezvous(ABC):
    """Where the ranks of one communicator meet.

    Attributes
    ----------
    store
        A store under a prefix that no other communicator uses.
    members
        The numbers by which errors name the ranks, by rank; the same on all ranks.
    rank
        Index of this process in ``members``.
    timeout
        Seconds after which a hanging exchange raises, equal on all ranks.
    """

    store: Store
    members: list[int]
    rank: int
    timeout: float

    @abstractmethod
    def engine(self) -> Engine:
        """Connect to the other ranks; all ranks call.

        Raises
        ------
        OSError, RuntimeError
            When some rank does not connect within the timeout.
        """

    def failure(self) -> Failure:
        """Return the failure state that the ranks share; called after `engine`."""
        return Failure(self.store, len(self.members))

    def below(self, label: str) -> Store:
        """Return the store with a prefix of its own, made by itself if it is written in Python."""
        under = getattr(self.store, "under", None)
        return PrefixStore(label, self.store) if under is None else under(label)

    def subgroup(self, ranks: list[int], label: str) -> Self:
        """Return the rendezvous of some of the ranks, this rank among them.

        Each subgroup has another ``label``.
        """
        return replace(
            self,
            store=self.below(label),
            members=[self.members[rank] for rank in ranks],
            rank=ranks.index(self.rank),
        )


@contextmanager
def connecting(me: int, members: list[int]) -> Iterator[None]:
    """Turn errors of connecting into `CommunicationError`.

    Parameters
    ----------
    me, members
        The number by which errors name this process, and those of all processes that connect.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:  # the kinds that torch and MPI raise
        others = [member for member in members if member != me]
        raise CommunicationError(
            f"rank {me} could not connect to ranks {others}, which must all be alive and connect"
            f" at about the same time: {error}"
        ) from error


T = TypeVar("T")


class _Family:
    """What communicators share that were split from one another; the executor ends with the last.

    They do not refer to one another, so each is collected as soon as nothing else refers to it.
    """

    def __init__(self, me: int, failure: Failure, device: torch.device) -> None:
        self.executor, self.traffic = Executor(me, failure), Traffic()
        self.side: SideStream = SideStream(device)
        # The finalizer only shuts down, and does not wait: the other ranks may drop their
        # communicators later, or never.
        weakref.finalize(self, self.executor.shutdown).atexit = False


class ConnectedCommunicator(Communicator):
    """Ranks in separate processes, joined by connections that nothing else uses.

    When one rank fails, the connections of the communicator, and of all communicators that are
    split from one another, are closed; every rank raises the first cause.

    Parameters
    ----------
    rendezvous
        Where the ranks meet; all ranks construct at the same time.
    family
        That of the communicator from which this one is split.
    label
        See `Communicator`.
    """

    def __init__(
        self, rendezvous: Rendezvous, family: _Family | None = None, label: str = ""
    ) -> None:
        self.rendezvous = rendezvous
        self.rank, self.size = rendezvous.rank, len(rendezvous.members)
        self.timeout = rendezvous.timeout
        self._errors = PeerErrors(rendezvous.members, self.rank)
        with connecting(self._errors.me, rendezvous.members):
            self.engine = rendezvous.engine()
        self.device, self.carrier = self.engine.device, self.engine.carrier
        self.label, self.closed, self._splits = label, False, 0
        self._failure = rendezvous.failure()
        self._is_first = family is None
        if family is None:
            family = _Family(self._errors.me, self._failure, self.device)
        else:
            release = family.executor.release
            weakref.finalize(self, release, self.engine, self._failure).atexit = False
        self._family, self._executor, self.traffic = family, family.executor, family.traffic
        self.calls, self._in_job = self._executor.calls, self._executor.queue.is_current
        self._executor.engines.append(self.engine)

    @exchanging
    @override
    def exchange_parts(self, sends: Leaving, receives: Bounds, control: int) -> Arrived:
        received = self.engine.exchange(sends, receives, self.calls.fingerprint, control)
        self.traffic.count_parts(sends.values(), received.values())
        return received

    @exchanging
    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        self.engine.all_reduce(tensor, op, self.calls.fingerprint)
        self.traffic.count_ring(tensor, self.size)

    def lost(self) -> list[int]:
        """Return the ranks whose connections have ended, as far as it is known."""
        return self.engine.lost()

    @override
    def run(self, job: Callable[[], T]) -> T:
        if self._in_job():
            return job()
        self._check_open()
        if self.device.type != "cpu":  # a thread that waits inside NCCL ignores Ctrl-C
            return self._executor.submit(as_here(job, self.device)).wait()
        return self._executor.run(job)

    @override
    def submit(self, job: Callable[[], T]) -> Job[T]:
        self._check_open()
        if self.device.type != "cpu":
            return submit_beside(self._family.side, self._executor.submit, job)
        return self._executor.submit(job)

    def close(self) -> None:
        """Wait for the jobs submitted so far and disconnect; all ranks call at about the same time.

        Closing a communicator also closes all communicators that were split from it, and ends their
        thread. Without a call, all of this happens once nothing refers to any of them, or when the
        interpreter exits. One that was split from another disconnects within seconds after nothing
        refers to it on any rank.
        """
        if self.closed:
            return
        self.closed = True
        if self._is_first:
            self._executor.close(seconds=None)
        else:
            with suppress(CommunicationError):  # the parent was closed, and this one with it
                self._executor.queue.submit(
                    lambda: self._executor.disconnect(self.engine, self._failure)
                ).wait()

    def _check_open(self) -> None:
        if self.closed:
            raise CommunicationError(CLOSED)

    def _subgroup(self, ranks: list[int], colour: int) -> Self:
        self._splits += 1
        label = f"{self._splits}.{colour}"
        meeting = self.rendezvous.subgroup(ranks, label)
        return type(self)(meeting, self._family, f"{self.label}/{label}")
