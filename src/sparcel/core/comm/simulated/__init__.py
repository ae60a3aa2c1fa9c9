"""Runs P ranks in one process, each on a thread, one at a time and in a fixed order.

The ranks run the same collectives as real processes do, over mailboxes. A run therefore repeats
exactly, and a deadlock is reported as soon as all ranks wait. The messages are recorded in a trace,
which tells how long the run would have taken on a network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from sparcel.core._checks import check_callable, check_type, checked_flag, checked_whole
from sparcel.core.comm.engine import Traffic
from sparcel.core.comm.failure import Cause
from sparcel.core.comm.simulated.cluster import Cluster, SimulatedCommunicator
from sparcel.core.comm.simulated.replay import Network, Trace, seconds_of
from sparcel.errors import MismatchError

T = TypeVar("T")


@dataclass(frozen=True)
class Report(Generic[T]):
    """The outcome of a simulation.

    Attributes
    ----------
    results
        What the function returned, by rank.
    traffic
        What each rank sent and received, by rank.
    network
        The network that was given to `simulate`.
    trace
        The messages that were sent, for `seconds_on`.
    """

    results: list[T]
    traffic: list[Traffic]
    network: Network
    trace: Trace

    @cached_property
    def seconds(self) -> float:
        """The slowest rank's virtual clock on `network`, in seconds.

        With ``latency_s=1`` and no bandwidth, this is the number of rounds: of messages on the
        critical path.
        """
        return self.seconds_on(self.network)

    @cached_property
    def between_nodes(self) -> list[Traffic]:
        """What each rank sent to ranks of other nodes and received from them, by rank."""
        counts = self.trace.between_nodes(self.network.ranks_per_node)
        return [Traffic(*counted) for counted in counts.T.tolist()]

    def seconds_on(self, network: Network) -> float:
        """Return the slowest rank's virtual clock if the run had been on another network."""
        check_type(network, Network, "network")
        return seconds_of(self.trace, network)


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
        Called once on every rank, with that rank's communicator.
    latency_s, bandwidth, ranks_per_node, node_latency_s, node_bandwidth
        See `Network`.
    cpu_time
        Whether a rank's clock advances by the CPU time that its thread uses between messages;
        otherwise only messages take time.

    Raises
    ------
    InputError
        When ``world_size`` or ``ranks_per_node`` is less than 1, a latency is negative, or a
        bandwidth is not positive.
    Exception
        The exception of the first rank that failed; a deadlock raises `CommunicationError`, or
        `MismatchError` if the ranks wait in different calls.
    """
    world_size = checked_whole(world_size, "world_size", at_least=1)
    check_callable(function, "function")
    network = Network(latency_s, bandwidth, ranks_per_node, node_latency_s, node_bandwidth)
    cluster = Cluster(world_size, ranks_per_node, checked_flag(cpu_time, "cpu_time"))
    return Report(_run(cluster, function), cluster.traffic, network, cluster.trace)


def _run(cluster: Cluster, function: Callable[[SimulatedCommunicator], T]) -> list[T]:
    """Return the function's results by rank; raise the first exception."""
    members = tuple(range(len(cluster.traffic)))
    results: list[Any] = [None for _ in members]
    errors: list[BaseException] = []

    def run_rank(rank: int) -> None:
        cluster.take_baton(rank)
        cluster.begin_work(rank)
        try:
            results[rank] = function(SimulatedCommunicator(cluster, members, rank))
        except BaseException as error:
            error.add_note(f"raised on simulated rank {rank} of {len(members)}")
            errors.append(error)
            cluster.fail(Cause(f"rank {rank} failed: {error}", isinstance(error, MismatchError)))
        finally:
            cluster.end_work(rank)
            cluster.pass_baton()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ranks = [threading.Thread(target=run_rank, args=(r,), daemon=True) for r in members]
        for thread in ranks:
            thread.start()
        cluster.pass_baton()
        for thread in ranks:
            thread.join()
    finally:
        torch.set_num_threads(threads)
    del errors[1:]
    if errors:
        raise errors.pop()  # which refers to this call, and no variable of it to the error
    return results


__all__ = ["Network", "Report", "SimulatedCommunicator", "simulate"]
