"""How ranks find out who was launched with them, and which of them share a machine."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparcel.core.comm.calls import digest
from sparcel.errors import InputError, MismatchError

if TYPE_CHECKING:
    from sparcel.core.comm.communicator import Communicator

_MPI_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""Variables that the launchers of MPICH, PMIx and Open MPI set."""

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""Variables that torchrun sets."""


def launched() -> tuple[str, ...]:
    """Return the engines for which this process was launched; none if it was started alone."""
    if any(name in os.environ for name in _MPI_RANKS) and "TORCHELASTIC_RUN_ID" not in os.environ:
        return ("gloo", "mpi")
    return ("gloo",) if all(name in os.environ for name in _TORCH) else ()


_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Variables in which torchrun, Open MPI, MPICH and Slurm give a process its rank on its node."""

_HOST_BITS = 40


@dataclass(frozen=True)
class Grid:
    """Ranks arranged as nodes × places.

    Attributes
    ----------
    node
        The ranks of this rank's node.
    across
        The ranks that have this rank's place on every node.
    """

    node: Communicator
    across: Communicator


def own_location() -> int:
    """Return this process's local rank and a hash of its hostname, packed in one number.

    The local rank is the one that the launcher gave, or -1; it stands in the upper bits.
    """
    return _local_rank() + 1 << _HOST_BITS | digest(socket.gethostname(), _HOST_BITS)


def nodes_of(locations: Sequence[int]) -> list[int]:
    """Return the number of each rank's node, given what `own_location` returned on each rank."""
    ranks = range(len(locations))
    local = [(location >> _HOST_BITS) - 1 for location in locations]
    starts = [rank for rank, place in enumerate(local) if place == 0]
    counted = [rank - max((s for s in starts if s <= rank), default=rank) for rank in ranks]
    if any(local) and local == counted:
        return [sum(start <= rank for start in starts) - 1 for rank in ranks]
    # The launcher did not number all ranks, or did not place consecutive ranks on a node. If every
    # rank reports local rank 0, the variable was probably inherited from a parent process. In all
    # these cases the hostnames decide.
    hosts = [location % (1 << _HOST_BITS) for location in locations]
    return [sorted(set(hosts), key=hosts.index).index(host) for host in hosts]


def split_in_grid(comm: Communicator, nodes: Sequence[int]) -> Grid:
    """Return the communicators of `Communicator.grid`, given the number of each rank's node."""
    sizes = Counter(nodes)
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"nodes must have equally many ranks, got {list(sizes.values())}; give another"
            " ranks_per_node, or start as many processes on each"
        )
    own = nodes[comm.rank]
    made = Grid(comm.split(own), comm.split(nodes[: comm.rank].count(own)))
    expected = sizes[own], len(sizes)
    if (made.node.size, made.across.size) != expected:
        raise MismatchError(
            f"ranks divide into nodes differently: rank {comm.rank} has {expected[1]} nodes of"
            f" {expected[0]}, others make its node one of {made.node.size}; give all the same"
            " ranks_per_node"
        )
    return made


def _local_rank() -> int:
    given = [os.environ[name] for name in _LOCAL_RANK if name in os.environ]
    return int(given[0]) if given and given[0].isdigit() else -1
