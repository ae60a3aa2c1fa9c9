"""What ranks tell and send one another."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch

from sparcel.core import api
from sparcel.core.comm import Call, Communicator, Group, resolve, world
from sparcel.core.stream import SparseStream
from sparcel.errors import InputError
from sparcel.products.rows.rows import Array

T = TypeVar("T")

_COLLECTED, _SCATTERED = Call.of("collected", {}), Call.of("scattered", {})


def ranks_of(group: Group) -> Communicator | None:
    """Return the communicator of a ``group=`` argument; None stands for a process alone.

    Without a group, these are the ranks that this process was launched with.
    """
    comm = world() if group is None else resolve(group)
    if comm is None or comm.size == 1:
        return None
    if comm.device.type != "cpu":
        raise InputError(
            f"linear models are trained on CPUs, and this group communicates from {comm.device};"
            " give a group of Gloo or MPI, such as group=dist.new_group(backend='gloo')"
        )
    return comm


def gathered(comm: Communicator | None, value: Any, what: str) -> list[Any]:
    """Return what each rank gave, by rank: anything that JSON holds.

    ``what`` names it, the same on all ranks.
    """
    if comm is None:
        return [value]
    message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)

    def gather() -> list[torch.Tensor]:
        return comm.gather(message, max(comm.gather_numbers(message.numel())))

    return [json.loads(bytes(part.numpy())) for part in comm.call(Call.of(what, {}), gather)]


def broadcast(array: Array | None, comm: Communicator | None) -> Array:
    """Return the values that rank 0 has, in one dimension; all ranks call."""
    stream = None
    if array is not None and (comm is None or comm.rank == 0):
        stream = SparseStream.unchecked(None, torch.from_numpy(array).view(-1), array.size)
    if comm is not None:
        stream = api.broadcast(stream, 0, comm)
    assert stream is not None
    found: Array = stream.values.numpy()
    return found


def collect(
    own: Array, out: Array, counts: Sequence[int], everywhere: bool, comm: Communicator
) -> None:
    """Write the rows that all ranks have, one's after the other's, to ``out``; all ranks call.

    ``everywhere`` tells whether all ranks get them, or rank 0 alone; ``counts`` how many each rank
    has. One rank sends at a time, so that a rank has only one part twice.
    """
    part, row_bytes = _bytes(own), own.itemsize * prod(own.shape[1:])
    takers = range(comm.size if everywhere else 1)
    for giver, (first, last) in enumerate(pairwise(accumulate(counts, initial=0))):
        sends, arriving = {}, {}
        if giver == comm.rank:
            sends = {rank: part for rank in takers if rank != giver}
        elif comm.rank in takers:
            arriving = {giver: (last - first) * row_bytes}
        arrived = comm.call(_COLLECTED, lambda: comm.exchange(sends, arriving))  # noqa: B023
        if comm.rank in takers:
            message = arrived.get(giver, part)
            out[first:last] = message.numpy().view(own.dtype).reshape(-1, *own.shape[1:])


def exchanged(
    rows: Array, leaving: Sequence[int], arriving: Sequence[int], comm: Communicator
) -> Array:
    """Send each rank its part of some rows; return those that came, one rank's after another's.

    Inside a job of the communicator, on all ranks. ``leaving`` and ``arriving`` tell how many rows
    go to, and come from, each rank.
    """
    row_bytes = rows.itemsize * prod(rows.shape[1:])
    arrived = comm.all_to_all(
        _bytes(rows), [row_bytes * count for count in leaving], [row_bytes * n for n in arriving]
    )
    return arrived.numpy().view(rows.dtype).reshape(-1, *rows.shape[1:])


def scattered(rows: Array, counts: Sequence[int], comm: Communicator) -> Array:
    """Return this rank's part of the rows that rank 0 gives; all ranks call.

    The parts of the ranks follow one another, and have so many rows. Other ranks give none, of the
    same dtype and shape.
    """
    none = [0] * comm.size
    arriving = [counts[comm.rank], *none[1:]]
    leaving = counts if comm.rank == 0 else none
    return comm.call(_SCATTERED, lambda: exchanged(rows, leaving, arriving, comm))


def _bytes(rows: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))


def run_or_fail_everywhere(comm: Communicator | None, own: Callable[[], T]) -> T:
    """Run what concerns this rank alone; where it fails on one rank, it fails on all.

    Raises
    ------
    InputError
        With the message of what ``own`` raised, on the lowest rank that failed. A process alone
        raises it as it is.
    """
    if comm is None:
        return own()
    result, wrong, cause = None, None, None
    try:
        result = own()
    except Exception as error:  # of any kind, because the others wait
        wrong, cause = str(error) or repr(error), error
    for found in gathered(comm, wrong, own.__qualname__):
        if found is not None:
            raise InputError(found) from cause
    return result  # type: ignore[return-value]
