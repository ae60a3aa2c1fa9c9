"""The exchanges that `measure` times, in each pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sparcel import patterns
from sparcel.comm import Communicator
from sparcel.cost.work import Run


@dataclass(frozen=True)
class Trial:
    """A call to time, which consists of ``rounds`` equal consecutive parts."""

    run: Run
    rounds: int = 1


def exchanges(
    comm: Communicator, ranks_per_node: int
) -> Iterator[tuple[str, Callable[[int], Trial]]]:
    """Yield each pattern's name, and a function from a message's bytes to a trial."""
    everybody = comm.size
    here = ranks_per_node if ranks_per_node < everybody else 1
    yield "shift", lambda nbytes: _in_turn(comm, _neighbours(comm.rank, here, everybody), nbytes)
    yield "tree", lambda nbytes: _broadcast(comm, nbytes, here)
    yield "rotate", lambda nbytes: _to_all(comm, nbytes, range(everybody))
    yield "gather", lambda nbytes: _gather(comm, nbytes)
    if here > 1:
        first = comm.rank // here * here
        place, members = comm.rank - first, range(first, first + here)
        around = [(first + to, first + source) for to, source in _neighbours(place, 1, here)]
        yield "node.shift", lambda nbytes: _in_turn(comm, around, nbytes)
        yield "node.rotate", lambda nbytes: _to_all(comm, nbytes, members)


def engine_sum(comm: Communicator, dtype: torch.dtype) -> Callable[[int], Trial]:
    """Return a function from a vector's bytes to a trial of the engine's all-reduce."""

    def trial(nbytes: int) -> Trial:
        vector = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
        return Trial(lambda: comm.all_reduce(vector))

    return trial


def _neighbours(rank: int, nearest: int, ranks: int) -> list[tuple[int, int]]:
    """Return the ranks that a rank sends to and receives from in each round of a gather."""
    rounds = patterns.bruck(0, -(-ranks // nearest))
    distances = [nearest * distance for _, _, distance, _ in rounds]
    return [((rank - far) % ranks, (rank + far) % ranks) for far in distances]


def _in_turn(comm: Communicator, peers: list[tuple[int, int]], nbytes: int) -> Trial:
    message = torch.zeros(nbytes, dtype=torch.uint8)

    def run() -> None:
        for to, source in peers:
            if to != comm.rank:
                comm.exchange({to: message}, {source: nbytes})

    return Trial(run, max(1, len(peers)))


def _broadcast(comm: Communicator, nbytes: int, here: int) -> Trial:
    """Send a message down a binomial tree of each node's first rank."""
    held = torch.zeros(nbytes, dtype=torch.uint8)
    levels = patterns.binomial_tree(comm.rank // here, comm.size // here)

    def run() -> None:
        for to, source, *_ in levels if comm.rank % here == 0 else ():
            if to is not None:
                comm.exchange({to * here: held}, {})
            elif source is not None:
                comm.exchange({}, {source * here: nbytes})

    return Trial(run, max(1, len(levels)))


def _to_all(comm: Communicator, nbytes: int, members: range) -> Trial:
    message = torch.zeros(nbytes, dtype=torch.uint8)
    place, count = comm.rank - members.start, len(members)
    rounds = patterns.rotation(place, count)
    sends = {members[to]: message for to, *_ in rounds}
    receives = {members[source]: nbytes for _, source, *_ in rounds}
    return Trial(lambda: comm.exchange(sends, receives), max(1, len(rounds)))


def _gather(comm: Communicator, nbytes: int) -> Trial:
    message = torch.zeros(nbytes, dtype=torch.uint8)
    return Trial(lambda: comm.gather(message, nbytes), comm.size - 1)
