"""The communicator of one rank of a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeVar

import torch
from torch import Tensor

from sparcel.comm.communicator import Communicator, exchanging
from sparcel.comm.engine import Arrived, Bounds, Leaving, PeerErrors
from sparcel.comm.failure import Cause
from sparcel.comm.jobs import Job
from sparcel.comm.ring import reduce_around
from sparcel.comm.simulated.cluster import Cluster
from sparcel.errors import MismatchError
from sparcel.ops import Op

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
        cluster, group, members, call = (
            self.cluster,
            self._group,
            self.members,
            self.calls.fingerprint,
        )
        me = members[self.rank]
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
