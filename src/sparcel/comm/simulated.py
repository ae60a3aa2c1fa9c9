"""A cluster in one process: P ranks, each a thread, one running at a time in a fixed order.

The ranks run the very collectives that real processes run, over mailboxes. A baton passes among
them only where a rank waits, so a run repeats exactly, and when all wait the deadlock is named at
once. Each rank has a virtual clock: a message of L bytes takes ``latency_s + L / bandwidth``; a
rank's port sends one message at a time and receives one at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from sparcel.comm.base import Communicator, Handle, Traffic
from sparcel.errors import CommunicationError, InputError, MismatchError
from sparcel.ops import SUM, Op

T = TypeVar("T")


@dataclass(frozen=True)
class Report(Generic[T]):
    """What a simulation gave.

    Attributes
    ----------
    results
        What the function returned, by rank.
    traffic
        What each rank sent and received.
    seconds
        The slowest rank's virtual clock. With ``latency_s=1`` and no bandwidth given this is the
        number of rounds: the messages on the critical path.
    """

    results: list[T]
    traffic: list[Traffic]
    seconds: float


@dataclass
class _Port:
    """The virtual clock of a rank, and when its port is free again, in seconds."""

    now: float = 0.0
    send_free: float = 0.0
    receive_free: float = 0.0


class _Key(NamedTuple):
    """A mailbox: messages of one group from one rank to another, numbered in the whole cluster."""

    group: tuple[int, ...]
    source: int
    destination: int


@dataclass(frozen=True)
class _Envelope:
    message: Tensor
    sent_from: float
    sent_until: float


class Cluster:
    """The mailboxes, the baton and the clocks that the simulated ranks share."""

    def __init__(self, world_size: int, latency_s: float, bandwidth: float) -> None:
        self.latency_s, self.bandwidth = latency_s, bandwidth
        self.traffic = [Traffic() for _ in range(world_size)]
        self.ports = [_Port() for _ in range(world_size)]
        self.mail: dict[_Key, deque[_Envelope]] = {}
        self._failure: str | None = None
        self._ready = deque(range(world_size))
        self._waiting: dict[int, _Key] = {}
        self._wake = [threading.Semaphore(0) for _ in range(world_size)]

    def start(self) -> None:
        """Give the baton to the first rank."""
        self._wake[self._ready.popleft()].release()

    def take_baton(self, rank: int) -> None:
        """Block until it is the turn of ``rank``."""
        self._wake[rank].acquire()

    def post(self, key: _Key, message: Tensor) -> None:
        """Put a message in the mail; the sender's port is busy while it leaves."""
        port = self.ports[key.source]
        begin = max(port.now, port.send_free)
        port.send_free = begin + self.latency_s + message.numel() / self.bandwidth
        self.mail.setdefault(key, deque()).append(_Envelope(message, begin, port.send_free))
        if self._waiting.get(key.destination) == key:
            del self._waiting[key.destination]
            self._ready.append(key.destination)

    def collect(self, key: _Key) -> Tensor:
        """Wait for the next message with this key and return it."""
        while not self.mail.get(key):
            self._waiting[key.destination] = key
            self._pass_baton()
            self.take_baton(key.destination)
            self.check()
        envelope, port = self.mail[key].popleft(), self.ports[key.destination]
        duration = self.latency_s + envelope.message.numel() / self.bandwidth
        begin = max(envelope.sent_from, port.receive_free)
        port.receive_free = max(envelope.sent_until, begin + duration)
        port.now = max(port.now, port.receive_free)
        return envelope.message

    def check(self) -> None:
        """Raise when some rank has failed."""
        if self._failure is not None:
            raise CommunicationError(self._failure)

    def fail(self, reason: str) -> None:
        """Let every rank that waits, now or later, raise ``reason``; the first reason stays."""
        self._failure = self._failure or reason
        self._ready.extend(self._waiting)
        self._waiting.clear()

    def finish(self) -> None:
        """Hand the baton on for good."""
        self._pass_baton()

    def _pass_baton(self) -> None:
        if not self._ready and self._waiting:
            waits = (f"rank {rank} for rank {key.source}" for rank, key in self._waiting.items())
            self.fail("deadlock, no rank can go on: " + ", ".join(waits) + " waits")
        if self._ready:
            self._wake[self._ready.popleft()].release()


class SimulatedCommunicator(Communicator):
    """One simulated rank's end of a cluster, or of a group that was split from it."""

    timeout = float("inf")
    device = torch.device("cpu")

    def __init__(self, cluster: Cluster, members: tuple[int, ...], rank: int) -> None:
        self.cluster, self.members = cluster, members
        self.rank, self.size = rank, len(members)
        self.traffic = cluster.traffic[members[rank]]

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """See `Communicator.exchange`; payloads are shared, not copied."""
        self.cluster.check()
        me = self.members[self.rank]
        for rank, message in sends.items():
            self.cluster.post(_Key(self.members, me, self.members[rank]), message)
        received = {}
        for rank, at_most in receives.items():
            message = self.cluster.collect(_Key(self.members, self.members[rank], me))
            if message.numel() > at_most:
                raise MismatchError(
                    f"rank {rank} sent {message.numel()} bytes to rank {self.rank}, which expected"
                    f" at most {at_most}; the ranks' sizes, dtypes or counts differ"
                )
            received[rank] = message
        self.traffic.count(sends, received)
        return received

    def all_reduce(self, tensor: Tensor, op: Op = SUM) -> None:
        """Reduce over a ring of ranks: a reduce-scatter and an all-gather of P chunks."""
        cuts = [rank * tensor.numel() // self.size for rank in range(self.size + 1)]
        chunks = [tensor.view(-1)[lo:hi] for lo, hi in pairwise(cuts)]
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for step in range(2 * (self.size - 1)):
            leaving = chunks[(self.rank - step) % self.size]
            arriving = chunks[(self.rank - step - 1) % self.size]
            message = self.exchange(
                {after: leaving.clone().view(torch.uint8)}, {before: arriving.nbytes}
            )[before]
            came = message.view(tensor.dtype)
            arriving.copy_(op.function(came, arriving) if step < self.size - 1 else came)

    def split(self, colour: int) -> Self:
        """See `Communicator.split`."""
        colours = self.gather_numbers(colour)
        members = [rank for rank in range(self.size) if colours[rank] == colour]
        whole = tuple(self.members[rank] for rank in members)
        return type(self)(self.cluster, whole, members.index(self.rank))

    def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` at once: a rank has one thread, so the order is that of the calls."""
        try:
            return job()
        except Exception as error:
            self.cluster.fail(f"rank {self.members[self.rank]} failed: {error}")
            raise

    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """Run ``job`` at once and return its finished handle."""
        handle: Handle[T] = Handle()
        try:
            handle.future.set_result(self.run(job))
        except Exception as error:
            handle.future.set_exception(error)  # type: ignore[arg-type]  # as for a result
        return handle


def simulate(
    world_size: int,
    function: Callable[[SimulatedCommunicator], T],
    *,
    latency_s: float = 0.0,
    bandwidth: float = float("inf"),
) -> Report[T]:
    """Run ``function(comm)`` on every rank of a simulated cluster.

    Parameters
    ----------
    world_size
        Number of ranks, at least 1.
    function
        Called once a rank, with that rank's communicator.
    latency_s, bandwidth
        The links: seconds a message, and bytes a second.

    Raises
    ------
    InputError
        When ``world_size`` is less than 1.
    Exception
        What the first rank to fail raised; a deadlock raises `CommunicationError`.
    """
    if world_size < 1:
        raise InputError(f"world_size must be at least 1, got {world_size}")
    cluster = Cluster(world_size, latency_s, bandwidth)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def live(rank: int) -> None:
        cluster.take_baton(rank)
        try:
            results[rank] = function(SimulatedCommunicator(cluster, tuple(range(world_size)), rank))
        except BaseException as error:
            error.add_note(f"raised on simulated rank {rank} of {world_size}")
            errors.append(error)
            cluster.fail(f"rank {rank} failed: {error}")
        finally:
            cluster.finish()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ranks = [threading.Thread(target=live, args=(r,), daemon=True) for r in range(world_size)]
        for thread in ranks:
            thread.start()
        cluster.start()
        for thread in ranks:
            thread.join()
    finally:
        torch.set_num_threads(threads)
    if errors:
        raise errors[0]
    seconds = max(max(port.now, port.send_free) for port in cluster.ports)
    return Report(results, cluster.traffic, seconds)
