"""A cluster in one process: P ranks, each a thread, one running at a time in a fixed order.

The ranks run the very collectives that real processes run, over mailboxes, so a run repeats
exactly, and when all wait the deadlock is named at once. What they sent is noted in a trace, which
tells how long the run would have taken on a network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from sparcel.comm.base import Communicator, Handle, Traffic
from sparcel.comm.cluster import Cluster, Mailbox
from sparcel.comm.timing import Network, Trace, seconds_of
from sparcel.errors import InputError, MismatchError
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
    network
        The network that was asked for.
    trace
        Which messages were sent, for `seconds_on`.
    """

    results: list[T]
    traffic: list[Traffic]
    network: Network
    trace: Trace

    @cached_property
    def seconds(self) -> float:
        """The slowest rank's virtual clock on the network that was asked for.

        With ``latency_s=1`` and no bandwidth given this is the number of rounds: the messages on
        the critical path.
        """
        return self.seconds_on(self.network)

    @cached_property
    def between_nodes(self) -> list[Traffic]:
        """What each rank sent to ranks of other nodes, and received from them."""
        counts = self.trace.between_nodes(self.network.ranks_per_node)
        return [Traffic(*counted) for counted in counts.T.tolist()]

    def seconds_on(self, network: Network) -> float:
        """Return the slowest rank's virtual clock, had the run been on another network."""
        return seconds_of(self.trace, network)


class SimulatedCommunicator(Communicator):
    """One simulated rank's end of a cluster, or of a group that was split from it."""

    timeout = float("inf")
    device = torch.device("cpu")

    def __init__(self, cluster: Cluster, members: tuple[int, ...], rank: int) -> None:
        self.cluster, self.members = cluster, members
        self.rank, self.size = rank, len(members)
        self.traffic = cluster.traffic[members[rank]]
        self._group = cluster.group(members)

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """See `Communicator.exchange`; payloads are shared, not copied."""
        received = self.exchange_parts({rank: [sent] for rank, sent in sends.items()}, receives)
        return {
            rank: parts[0] if len(parts) == 1 else torch.cat(parts)
            for rank, parts in received.items()
        }

    def exchange_parts(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]
    ) -> dict[int, list[Tensor]]:
        """See `Communicator.exchange_parts`; payloads are shared, neither copied nor joined."""
        cluster, traffic, me = self.cluster, self.traffic, self.members[self.rank]
        cluster.check()
        cluster.end_work(me)
        for rank, parts in sends.items():
            nbytes = sum([part.numel() for part in parts])
            cluster.post(Mailbox(self._group, me, self.members[rank]), parts, nbytes)
            traffic.messages_sent += 1
            traffic.bytes_sent += nbytes
        received = {}
        for rank, at_most in receives.items():
            parts = cluster.collect(Mailbox(self._group, self.members[rank], me))
            nbytes = sum([part.numel() for part in parts])
            if nbytes > at_most:
                raise MismatchError(
                    f"rank {rank} sent {nbytes} bytes to rank {self.rank}, which expected"
                    f" at most {at_most}; the ranks' sizes, dtypes or counts differ"
                )
            traffic.messages_received += 1
            traffic.bytes_received += nbytes
            received[rank] = list(parts)
        cluster.begin_work(me)
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
    ranks_per_node: int = 1,
    node_latency_s: float = 0.0,
    node_bandwidth: float = float("inf"),
    cpu_time: bool = False,
) -> Report[T]:
    """Run ``function(comm)`` on every rank of a simulated cluster.

    Parameters
    ----------
    world_size
        Number of ranks, at least 1.
    function
        Called once a rank, with that rank's communicator.
    latency_s, bandwidth
        The links between nodes: seconds a message, and bytes a second.
    ranks_per_node
        Rank r lives on node r // ranks_per_node; by default each has a node of its own. The ranks
        of a node share one port to the other nodes.
    node_latency_s, node_bandwidth
        The links inside a node, where each rank has a port of its own.
    cpu_time
        Whether a rank's clock advances by the CPU time that its thread takes between messages;
        otherwise only messages take time.

    Raises
    ------
    InputError
        When ``world_size`` or ``ranks_per_node`` is less than 1, a latency is negative, or a
        bandwidth is not positive.
    Exception
        What the first rank to fail raised; a deadlock raises `CommunicationError`.
    """
    if world_size < 1:
        raise InputError(f"world_size must be at least 1, got {world_size}")
    network = Network(latency_s, bandwidth, ranks_per_node, node_latency_s, node_bandwidth)
    cluster = Cluster(world_size, ranks_per_node, cpu_time)
    return Report(_run(cluster, function), cluster.traffic, network, cluster.trace)


def _run(cluster: Cluster, function: Callable[[SimulatedCommunicator], T]) -> list[T]:
    """Return what the function returned on each rank; raise what the first one raised."""
    everybody = tuple(range(len(cluster.traffic)))
    results: list[Any] = [None for _ in everybody]
    errors: list[BaseException] = []

    def live(rank: int) -> None:
        cluster.take_baton(rank)
        cluster.begin_work(rank)
        try:
            results[rank] = function(SimulatedCommunicator(cluster, everybody, rank))
        except BaseException as error:
            error.add_note(f"raised on simulated rank {rank} of {len(everybody)}")
            errors.append(error)
            cluster.fail(f"rank {rank} failed: {error}")
        finally:
            cluster.finish(rank)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ranks = [threading.Thread(target=live, args=(r,), daemon=True) for r in everybody]
        for thread in ranks:
            thread.start()
        cluster.start()
        for thread in ranks:
            thread.join()
    finally:
        torch.set_num_threads(threads)
    if errors:
        raise errors[0]
    return results
