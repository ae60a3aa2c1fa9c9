"""The state that simulated ranks share: mailboxes, and a baton that lets one rank run at a time.

A rank passes the baton on only when it waits for a message: to the rank that it waits for, if that
rank can run, and otherwise to the rank that became ready last. Ranks therefore run only as far as
others need them, few of them hold large results at once, and every run takes the same course.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

import torch
from torch import Tensor

from sparcel.core.comm.calls import Calls, differences
from sparcel.core.comm.communicator import Communicator, exchanging
from sparcel.core.comm.engine import (
    SAME_CALLS,
    Arrived,
    Bounds,
    Leaving,
    PeerErrors,
    Traffic,
    reduce_around,
)
from sparcel.core.comm.failure import Cause
from sparcel.core.comm.jobs import Job
from sparcel.core.comm.simulated.replay import Trace
from sparcel.core.ops import Op
from sparcel.errors import MismatchError


@dataclass(eq=False, slots=True)
class Mailbox:
    """The messages of one group that one rank of the cluster has sent to another.

    A message has its number in the trace, its parts, its length, and the fingerprint of its call.
    """

    source: int
    destination: int
    messages: deque[tuple[int, Sequence[Tensor], int, int]] = field(default_factory=deque)


class Cluster:
    """The mailboxes, the baton and the trace.

    Parameters
    ----------
    world_size
        Number of ranks.
    ranks_per_node
        How many consecutive ranks form a node.
    cpu_time
        Whether the trace records the CPU time that ranks use between messages.
    """

    def __init__(self, world_size: int, ranks_per_node: int = 1, cpu_time: bool = False) -> None:
        self.ranks_per_node = ranks_per_node
        self.traffic = [Traffic() for _ in range(world_size)]
        self.calls = [Calls() for _ in range(world_size)]
        self.trace = Trace(world_size)
        self._mailboxes: dict[tuple[int, int, int], Mailbox] = {}
        self._groups: dict[tuple[int, ...], int] = {}
        self._cpu_time = cpu_time
        self._idle_since = [0.0] * world_size
        self._failure: Cause | None = None
        # A dict serves as an ordered set; the last rank in it runs first.
        self._ready = dict.fromkeys(reversed(range(world_size)))
        self._waiting: dict[int, Mailbox] = {}
        # All locks are taken; releasing one wakes its rank.
        self._wake = [threading.Lock() for _ in range(world_size)]
        for lock in self._wake:
            lock.acquire()

    def group(self, members: tuple[int, ...]) -> int:
        """Return the number that identifies the group of these ranks."""
        return self._groups.setdefault(members, len(self._groups))

    def mailbox(self, group: int, source: int, destination: int) -> Mailbox:
        """Return the mailbox of a group's messages from one rank of the cluster to another."""
        key = group, source, destination
        if key not in self._mailboxes:
            self._mailboxes[key] = Mailbox(source, destination)
        return self._mailboxes[key]

    def take_baton(self, rank: int) -> None:
        """Block until it is the turn of ``rank``."""
        self._wake[rank].acquire()

    def begin_work(self, rank: int) -> None:
        """Start counting the CPU time of this thread as work of ``rank``."""
        if self._cpu_time:
            self._idle_since[rank] = time.thread_time()

    def end_work(self, rank: int) -> None:
        """Record the CPU time since `begin_work`."""
        if self._cpu_time:
            self.trace.add_work(rank, time.thread_time() - self._idle_since[rank])

    def post(self, box: Mailbox, parts: Sequence[Tensor], call: int) -> int:
        """Put a message in a mailbox and return its length; parts are shared, not copied."""
        nbytes = sum([part.numel() for part in parts])
        number = self.trace.send(box.source, box.destination, nbytes)
        box.messages.append((number, parts, nbytes, call))
        if self._waiting.get(box.destination) is box:
            del self._waiting[box.destination]
            self._ready[box.destination] = None
        return nbytes

    def collect(self, box: Mailbox) -> tuple[Sequence[Tensor], int, int]:
        """Wait for a mailbox's next message; return its parts, its length and its call."""
        while not box.messages:
            self._waiting[box.destination] = box
            self.pass_baton(box.source)
            self.take_baton(box.destination)
            self.check()
        number, parts, nbytes, call = box.messages.popleft()
        self.trace.receive(number)
        return parts, nbytes, call

    def check(self) -> None:
        """Raise when some rank has failed."""
        if self._failure is not None:
            raise self._failure.error()

    def fail(self, cause: Cause) -> None:
        """Make every rank that waits, now or later, raise ``cause``, or the first cause given."""
        self._failure = self._failure or cause
        self._ready.update(dict.fromkeys(self._waiting))
        self._waiting.clear()

    def differences(self) -> str:
        """Say which ranks called what, if their last calls differ."""
        latest = {rank: calls.latest for rank, calls in enumerate(self.calls)}
        return differences({rank: call.texts for rank, call in latest.items() if call})

    def pass_baton(self, wanted: int | None = None) -> None:
        """Wake the rank that is wanted if it can run, or else the one that became ready last."""
        if not self._ready and self._waiting:
            self.fail(self._deadlock())
        if wanted in self._ready:
            del self._ready[wanted]
            self._wake[wanted].release()
        elif self._ready:
            self._wake[self._ready.popitem()[0]].release()

    def _deadlock(self) -> Cause:
        waiting = sorted(self._waiting.items())
        waits = ", ".join(f"rank {rank} waits for rank {box.source}" for rank, box in waiting)
        differ = len({self.calls[rank].latest for rank, _ in waiting}) > 1
        told = [f"deadlock, no rank can go on: {waits}"]
        return Cause("; ".join([*told, SAME_CALLS, self.differences()] if differ else told), differ)


T = TypeVar("T")


class SimulatedCommunicator(Communicator):
    """The communicator of one rank, over the whole cluster or over a group split from it."""

    timeout = float("inf")
    device = torch.device("cpu")
    carrier = "a simulated cluster"

    def __init__(self, cluster: Cluster, members: tuple[int, ...], rank: int) -> None:
        self.cluster, self.members = cluster, members
        self.rank, self.size = rank, len(members)
        self.traffic, self.calls = cluster.traffic[members[rank]], cluster.calls[members[rank]]
        self._group = cluster.group(members)
        self.label = str(self._group)
        self._errors = PeerErrors(members, rank)
        self._running = False

    @exchanging
    def exchange_parts(self, sends: Leaving, receives: Bounds, control: int) -> Arrived:
        """See `Communicator.exchange_parts`; parts are neither copied nor joined."""
        cluster, group, members = self.cluster, self._group, self.members
        me, call = members[self.rank], self.calls.fingerprint
        cluster.check()
        cluster.end_work(me)
        sent = [
            cluster.post(cluster.mailbox(group, me, members[rank]), parts, call)
            for rank, parts in sends.items()
        ]
        received, lengths = {}, []
        for rank, at_most in receives.items():
            box = cluster.mailbox(group, members[rank], me)
            parts, nbytes, their_call = cluster.collect(box)
            if their_call != call:
                said = str(self._errors.other_call(rank)), cluster.differences()
                raise MismatchError("; ".join(filter(None, said)))
            if nbytes > at_most:
                raise self._errors.other_length(rank, nbytes, f"at most {at_most}")
            received[rank] = list(parts)
            lengths.append(nbytes)
        self.traffic.count(sent, lengths)
        cluster.begin_work(me)
        return received

    @exchanging
    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        """Reduce around a ring."""

        def swap(to: int, leaving: Tensor, source: int, arriving: Tensor) -> None:
            # A copy, since the receiver may look at the message after this rank has gone on.
            due = arriving.numel()
            came = self.exchange({to: leaving.clone()}, {source: due})[source]
            if came.numel() != due:
                raise self._errors.other_length(source, came.numel(), due)
            arriving.copy_(came)

        reduce_around(tensor, op, self.rank, self.size, swap)

    def _subgroup(self, ranks: list[int], colour: int) -> Self:
        members = tuple([self.members[rank] for rank in ranks])
        return type(self)(self.cluster, members, ranks.index(self.rank))

    def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` at once: a rank has one thread, so jobs run in the order of the calls."""
        if self._in_job():
            return job()
        self._running = True
        try:
            return job()
        except Exception as error:
            text = f"rank {self._errors.me} failed: {error}"
            self.cluster.fail(Cause(text, isinstance(error, MismatchError)))
            raise
        finally:
            self._running = False

    def _in_job(self) -> bool:
        return self._running

    def submit(self, job: Callable[[], T]) -> Job[T]:
        """Run ``job`` at once and return it, ended."""
        ended = Job(lambda: self.run(job))
        ended.run()
        return ended

    def close(self) -> None:
        """Do nothing: jobs have run, and there are no connections."""

    def nodes(self) -> list[int]:
        """See `Communicator.nodes`; the cluster knows them."""
        return [member // self.cluster.ranks_per_node for member in self.members]
