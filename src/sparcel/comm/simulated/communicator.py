"""The communicator of one rank of a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Self, TypeVar

import torch
from torch import Tensor

from sparcel import patterns
from sparcel.comm.communicator import Communicator
from sparcel.comm.engine import other_call, too_long
from sparcel.comm.failure import Cause
from sparcel.comm.jobs import Job
from sparcel.comm.simulated.cluster import Cluster, Mailbox
from sparcel.errors import MismatchError
from sparcel.ops import SUM, Op
from sparcel.profiling import timed

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

    @timed("messages")
    def exchange_parts(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int], control: int
    ) -> dict[int, list[Tensor]]:
        """See `Communicator.exchange_parts`; parts are neither copied nor joined."""
        cluster, me = self.cluster, self.members[self.rank]
        cluster.check()
        cluster.end_work(me)
        for rank, parts in sends.items():
            nbytes = sum([part.numel() for part in parts])
            cluster.post(Mailbox(self._group, me, self.members[rank]), parts, nbytes)
            self.traffic.count([nbytes], [])
        received = {}
        for rank, at_most in receives.items():
            _, parts, call = cluster.collect(Mailbox(self._group, self.members[rank], me))
            if call != self.calls.fingerprint:
                error = other_call(self.members[rank], me)
                raise MismatchError("; ".join(filter(None, (str(error), cluster.differences()))))
            nbytes = sum([part.numel() for part in parts])
            if nbytes > at_most:
                raise too_long(rank, nbytes, self.rank, at_most)
            self.traffic.count([], [nbytes])
            received[rank] = list(parts)
        cluster.begin_work(me)
        return received

    @timed("messages")
    def all_reduce(self, tensor: Tensor, op: Op = SUM) -> None:
        """Reduce by the ring algorithm: reduce-scatter, then all-gather, of P chunks."""
        cuts = patterns.regions(tensor.numel(), self.size)
        chunks = [tensor.view(-1)[lo:hi] for lo, hi in pairwise(cuts)]
        around = patterns.ring(self.rank, self.size)
        for step, (after, before, *_) in enumerate([*around, *around]):
            leaving = chunks[(self.rank - step) % self.size]
            arriving = chunks[(self.rank - step - 1) % self.size]
            message = self.exchange(
                {after: leaving.clone().view(torch.uint8)}, {before: arriving.nbytes}
            )[before]
            arrived = message.view(tensor.dtype)
            arriving.copy_(op.apply(arrived, arriving) if step < self.size - 1 else arrived)

    def split(self, colour: int) -> Self:
        """See `Communicator.split`."""
        colours = self.gather_numbers(colour)
        members = [rank for rank in range(self.size) if colours[rank] == colour]
        on_cluster = tuple(self.members[rank] for rank in members)
        return type(self)(self.cluster, on_cluster, members.index(self.rank))

    def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` at once: a rank has one thread, so jobs run in the order of the calls."""
        try:
            return job()
        except Exception as error:
            text = f"rank {self.members[self.rank]} failed: {error}"
            self.cluster.fail(Cause(text, isinstance(error, MismatchError)))
            raise

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
