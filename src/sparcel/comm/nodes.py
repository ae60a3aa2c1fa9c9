"""Which ranks share a machine, and communicators along the two directions of that grid."""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from dataclasses import dataclass

from sparcel.comm.base import Communicator
from sparcel.comm.simulated import SimulatedCommunicator
from sparcel.errors import InputError, MismatchError

_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Where torchrun, Open MPI, MPICH and Slurm say which of its node's ranks a process is."""

_HOST_BITS = 40


@dataclass(frozen=True)
class Grid:
    """Ranks as nodes × places: ``node`` are those of this node, ``across`` those of this place."""

    node: Communicator
    across: Communicator


def grid(comm: Communicator, ranks_per_node: int | None = None) -> Grid:
    """Return the communicators of this rank's node and place; all ranks call.

    They are made once for a communicator, and close with it.

    Parameters
    ----------
    ranks_per_node
        Consecutive ranks that form a node; None takes the local ranks that the launcher gave,
        or else the hostnames.

    Raises
    ------
    InputError
        When nodes have different numbers of ranks.
    MismatchError
        When this rank's node came out otherwise, since others gave another ``ranks_per_node``.
    """
    known: dict[int | None, Grid] = vars(comm).setdefault("_grids", {})
    if ranks_per_node not in known:
        nodes = _nodes(comm, ranks_per_node)
        sizes = Counter(nodes)
        if len(set(sizes.values())) > 1:
            raise InputError(
                f"nodes must have equally many ranks, got {list(sizes.values())}; give another"
                " ranks_per_node, or start as many processes on each"
            )
        place = nodes[: comm.rank].count(nodes[comm.rank])
        made = Grid(comm.split(nodes[comm.rank]), comm.split(place))
        expected = sizes[nodes[comm.rank]], len(sizes)
        if (made.node.size, made.across.size) != expected:
            raise MismatchError(
                f"ranks divide into nodes differently: rank {comm.rank} has {expected[1]} nodes of"
                f" {expected[0]}, others make its node one of {made.node.size}; give all the same"
                " ranks_per_node"
            )
        known[ranks_per_node] = made
    return known[ranks_per_node]


def _nodes(comm: Communicator, ranks_per_node: int | None) -> list[int]:
    """Return the number of each rank's node."""
    if ranks_per_node is None and isinstance(comm, SimulatedCommunicator):
        return [member // comm.cluster.ranks_per_node for member in comm.members]
    if ranks_per_node is not None:
        return [rank // ranks_per_node for rank in range(comm.size)]
    answers = comm.gather_numbers(_local_rank() + 1 << _HOST_BITS | _host())
    local = [(answer >> _HOST_BITS) - 1 for answer in answers]
    starts = [rank for rank, place in enumerate(local) if place == 0]
    counted = [
        rank - max((s for s in starts if s <= rank), default=rank) for rank in range(comm.size)
    ]
    if any(local) and local == counted:
        return [sum(start <= rank for start in starts) - 1 for rank in range(comm.size)]
    # No launcher said it for all, or the ranks of nodes are not consecutive. Where all are a node's
    # first they may be children of one process, whose number they inherited.
    hosts = [answer % (1 << _HOST_BITS) for answer in answers]
    return [sorted(set(hosts), key=hosts.index).index(host) for host in hosts]


def _local_rank() -> int:
    """Return this process's number on its node as the launcher gave it, or -1."""
    given = [os.environ[name] for name in _LOCAL_RANK if name in os.environ]
    return int(given[0]) if given and given[0].isdigit() else -1


def _host() -> int:
    digest = hashlib.blake2b(socket.gethostname().encode(), digest_size=_HOST_BITS // 8)
    return int.from_bytes(digest.digest())


def consecutive_per_node(comm: Communicator) -> int:
    """Return how many consecutive ranks form a node, as launcher or hostnames say.

    1 where nodes have different numbers of ranks, or ranks that do not follow each other. All ranks
    call, in a job, and get the same.
    """
    nodes = _nodes(comm, None)
    count = nodes.count(nodes[0])
    regular = nodes == [rank // count for rank in range(comm.size)]
    return count if regular else 1
