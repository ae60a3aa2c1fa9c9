"""Sums and gathers of counts, from which the ranks make decisions.

Counts do not travel in the streams' format. Few ranks send them as bare integers, many ranks as
plainly encoded streams. Either way they are control altogether, and stay on the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparcel.core import device
from sparcel.core.collectives.doubling import halving_doubling, recursive_doubling
from sparcel.core.comm import ALL_CONTROL, DIRECT_RANKS, Communicator
from sparcel.core.formats import RAW
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.errors import FormatError, MismatchError

FEW_RANKS = 16
"""The most ranks with which counts are summed by recursive doubling. It takes half the rounds of
halving and doubling, but ⌈log₂P⌉ instead of 2 times the bytes, some KB. Up to `DIRECT_RANKS`, one
exchange of P−1 times the bytes is better still."""

_WORD = 0x5C_0C_07_00
"""The first word of numbers that travel without a header. It is one more if the rank said
``finite``."""

_FOREIGN = "rank {} sent rank {} no counts; every rank must call the same collective"


def counters_for(ranks: int) -> int:
    """Return how many counts to sum at a time, a power of two.

    Few ranks sum in one round, so they sum few counts, 2 KB in all, and again where they must know
    more. Many ranks take many rounds for a sum, so that a thousand counts take hardly longer.
    """
    most = 512 // max(1, ranks - 1) if ranks <= DIRECT_RANKS else 1024
    return 1 << (most.bit_length() - 1)


def sum_counts(
    counts: Tensor, comm: Communicator, limit: int, finite: bool | Tensor = True
) -> tuple[Tensor, bool]:
    """Sum the ranks' counts, and tell whether all ranks said ``finite``.

    Parameters
    ----------
    counts
        int64 ``[m]``, at least 0, on any device.
    limit
        The largest value that a sum can have, the same on all ranks. It decides whether counts
        travel as int32 or int64. Zeros are left out if that is smaller.
    """
    dtype = torch.int32 if limit < 1 << 31 else torch.int64
    own, finite = device.read_flagged(counts, finite)
    if comm.size <= DIRECT_RANKS:
        return _sum_directly(own.to(dtype), comm, finite)
    places = own.nonzero().squeeze(1)
    stream = SparseStream(places, own[places].to(dtype), own.numel())
    stream.finite = finite
    add = recursive_doubling if comm.size <= FEW_RANKS else halving_doubling
    total = add(stream, Wire(comm, control=ALL_CONTROL))
    return total.to_dense().long(), bool(total.finite)


def _sum_directly(counts: Tensor, comm: Communicator, finite: bool) -> tuple[Tensor, bool]:
    """Sum the counts of few ranks; each sends its first to its last nonzero count to all others."""
    own = counts.numpy()
    occupied = np.flatnonzero(own)
    start, stop = (occupied[0], occupied[-1] + 1) if occupied.size else (0, 0)
    numbers = np.concatenate((own.dtype.type([own.size, start]), own[start:stop]))
    parts, finite = _gather_directly(numbers, comm, 2 + own.size, finite)
    total = np.zeros(own.size, np.int64)
    for rank, part in enumerate(parts):
        size, first = part[:2].tolist() if part.size > 1 else (0, 0)
        rest = part[2:]
        if size != own.size or not 0 <= first <= size - rest.size:
            raise MismatchError(
                f"rank {rank} sent rank {comm.rank} counts of size {size}, but size {own.size}"
                " was expected; every rank must call with the same size, dtype and width"
            )
        total[first : first + rest.size] += rest
    return torch.from_numpy(total), finite


def counting_bytes(counts: int, ranks: int) -> int:
    """Return about how many bytes a rank sends in `sum_counts`; ``counts`` is their number."""
    if ranks > FEW_RANKS:
        return 8 * counts
    return 4 * counts * (ranks - 1 if ranks <= DIRECT_RANKS else (ranks - 1).bit_length())


def gather_integers(
    numbers: Tensor, comm: Communicator, at_most: int, finite: bool = True
) -> tuple[list[Tensor], bool]:
    """Give every rank each rank's integers, and tell whether all ranks said ``finite``.

    Parameters
    ----------
    numbers
        ``[m]`` with m up to ``at_most``, on the host; int32 or int64, the same dtype on all ranks.

    Returns
    -------
    The integers of each rank as int64 on the CPU, and whether all ranks said ``finite``.
    """
    if comm.size <= DIRECT_RANKS:
        parts, finite = _gather_directly(numbers.numpy(), comm, at_most, finite)
        return [torch.from_numpy(part.astype(np.int64)) for part in parts], finite
    own = SparseStream.unchecked(None, numbers, numbers.numel(), finite)
    wire = Wire(comm, control=ALL_CONTROL)
    longest = RAW.nbytes(None, at_most, own.dtype.itemsize)
    messages = wire.gather_messages(wire.pack(own).message, longest)
    streams = [wire.decode(rank, message, None) for rank, message in enumerate(messages)]
    return [stream.values.long() for stream in streams], all(stream.finite for stream in streams)


def _gather_directly(
    numbers: np.ndarray, comm: Communicator, at_most: int, finite: bool
) -> tuple[list[np.ndarray], bool]:
    """Gather integers that follow a single word instead of a header, which is slow to decode."""
    word = numbers.dtype.type([_WORD + finite])
    message = torch.from_numpy(np.concatenate((word, numbers))).view(torch.uint8)
    arrived = comm.gather(message, (1 + at_most) * numbers.itemsize, ALL_CONTROL)
    words, parts = [], []
    for rank, part in enumerate(arrived):
        if part.numel() % numbers.itemsize or not part.numel():
            raise FormatError(_FOREIGN.format(rank, comm.rank))
        integers = part.numpy().view(numbers.dtype)
        words.append(int(integers[0]))
        parts.append(integers[1:])
        if words[-1] not in (_WORD, _WORD + 1):
            raise FormatError(_FOREIGN.format(rank, comm.rank))
    return parts, all(word == _WORD + 1 for word in words)
