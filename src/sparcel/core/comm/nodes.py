"""How ranks find out who was launched with them, and which of them share a machine."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence

from sparcel.core.comm.calls import digest
from sparcel.errors import InputError, MismatchError

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


def place_of(rank: int, nodes: Sequence[int]) -> tuple[int, int]:
    """Return a rank's node and its place there, given the number of each rank's node.

    Raises
    ------
    InputError
        When nodes have different numbers of ranks.
    """
    sizes = list(Counter(nodes).values())
    if len(set(sizes)) > 1:
        raise InputError(
            f"nodes must have equally many ranks, got {sizes}; give another ranks_per_node, or"
            " start as many processes on each"
        )
    return nodes[rank], nodes[:rank].count(nodes[rank])


def check_divided(rank: int, nodes: Sequence[int], found: tuple[int, int]) -> None:
    """Raise `MismatchError` unless others divide into nodes as this rank does.

    ``found`` are how many ranks came together of its node, and of its place on all nodes.
    """
    expected = nodes.count(nodes[rank]), len(set(nodes))
    if found != expected:
        raise MismatchError(
            f"ranks divide into nodes differently: rank {rank} has {expected[1]} nodes of"
            f" {expected[0]}, others make its node one of {found[0]}; give all the same"
            " ranks_per_node"
        )


def _local_rank() -> int:
    given = [os.environ[name] for name in _LOCAL_RANK if name in os.environ]
    return int(given[0]) if given and given[0].isdigit() else -1
