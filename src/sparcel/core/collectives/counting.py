"""What ranks find out by counting: boundaries of regions that hold equal shares, and who wins.

Nobody gathers the entries, or the sums, of all ranks. Counts do not travel in the streams' format.
Few ranks send them as bare integers, many ranks as plainly encoded streams. Either way they are
control altogether, and stay on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparcel.core import device, kernels, patterns
from sparcel.core.collectives.doubling import halving_doubling, recursive_doubling
from sparcel.core.comm import ALL_CONTROL, DIRECT_RANKS, Communicator
from sparcel.core.device import finite_flag
from sparcel.core.formats import RAW
from sparcel.core.profiling import timed
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


TOLERANCE, TOLERATED = 512, 6
"""A region may exceed its share by `TOLERANCE` entries, by the share / `TOLERATED`, or by P
entries, whichever is the most (see below)."""


def balanced_boundaries(
    stream: SparseStream, comm: Communicator, max_nnz: int | None
) -> tuple[list[int], bool]:
    """Divide the coordinates into regions so that all owners receive about as many entries.

    Parameters
    ----------
    stream
        Sparse: the entries that this rank will send, at most ``max_nnz``.

    Returns
    -------
    boundaries
        P+1, the same on all ranks: region r is ``[boundaries[r], boundaries[r + 1])``. With N the
        entries of all ranks, a region has at most ⌈N / P⌉ + max(P, TOLERANCE, N / P / TOLERATED).
    finite
        Whether the streams of all ranks are finite.

    Notes
    -----
    The ranks sum how many of their entries lie below each of some edges. A boundary
    belongs between two edges. If too many entries lie between them, the ranks count again with new
    edges between these two. One coordinate cannot be split, but it has at most P entries.
    Source: Ok-Topk, section 3.1.1, which averages the ranks' own boundaries instead.
    """
    assert stream.indices is not None, "the caller made it sparse"
    indices, size, ranks = stream.indices, stream.size, comm.size
    cuts = edges_for(ranks)
    limit = ranks * (size if max_nnz is None else max_nnz)

    def count_below(edges: Tensor) -> tuple[Tensor, bool]:
        places = device.put(edges, indices.device, indices.dtype)
        return sum_counts(torch.searchsorted(indices, places), comm, limit, stream.finite)

    start, stop = torch.tensor([0]), torch.tensor([size])
    edges = torch.cat((_subdivide(start, stop, cuts), stop))
    below, finite = count_below(edges)
    edges, below = torch.cat((start, edges)), torch.cat((start, below))
    wanted = torch.arange(1, ranks) * below[-1] // ranks
    tolerance = max(ranks, TOLERANCE, int(below[-1]) // (ranks * TOLERATED))
    while finite and (crowded := _crowded(below, wanted, tolerance)).numel():
        new = _subdivide(edges[crowded], edges[crowded + 1], cuts // crowded.numel())
        edges, order = torch.cat((edges, new)).sort()
        below = torch.cat((below, count_below(new)[0]))[order]
    cell = _cells(below, wanted)
    nearer = cell + (2 * (wanted - below[cell]) > below.diff()[cell]).long()
    return [0, *edges[nearer].tolist(), size], finite


def _cells(below: Tensor, wanted: Tensor) -> Tensor:
    """Return, for each boundary, the last cell with at most ``wanted`` entries below it.

    Cell j lies between edges j and j + 1, and has ``below[j]`` entries below it.
    """
    cells = torch.searchsorted(below, wanted, right=True) - 1
    return cells.clamp(max=below.numel() - 2)


def _crowded(below: Tensor, wanted: Tensor, tolerance: int) -> Tensor:
    """Return the boundaries' cells that hold more than ``tolerance`` entries."""
    cells: Tensor = _cells(below, wanted).unique()
    return cells[below.diff()[cells] > tolerance]


def edges_for(ranks: int) -> int:
    """Return how many edges are counted in a sum: several for each boundary."""
    return max(counters_for(ranks), 4 * ranks)


def average_boundaries(stream: SparseStream, comm: Communicator) -> list[int]:
    """Average the boundaries that would divide each rank's own entries evenly.

    Source: Ok-Topk, section 3.1.1. The average is computed in integers, so all ranks agree.
    """
    assert stream.indices is not None, "the caller made it sparse"
    ranks, size = comm.size, stream.size
    if stream.nnz:
        places = patterns.cuts(stream.nnz, ranks)[1:-1]
        own = stream.indices[device.put(places, stream.device, torch.int64)].long()
    else:
        own = torch.tensor(patterns.cuts(size, ranks)[1:-1], dtype=torch.int64)
    total, _ = sum_counts(own, comm, ranks * size)
    return [0, *(total // ranks).tolist(), size]


def _subdivide(starts: Tensor, stops: Tensor, parts: int) -> Tensor:
    """Return the sorted edges that cut each ``[start, stop)`` into about ``parts`` parts."""
    widths = (-(-(stops - starts) // parts)).clamp(min=1)
    edges = starts[:, None] + widths[:, None] * torch.arange(1, parts)
    return edges[edges < stops[:, None]]


def histogram_bits(ranks: int) -> tuple[int, int]:
    """Return how many bits of the magnitude the first and each later histogram resolve.

    The first one resolves at least a float32's exponent, of which few values occur.
    """
    more = counters_for(ranks).bit_length() - 1
    return max(8, more + 1), more


def few(ranks: int) -> int:
    """Return the most candidates to gather: their values take no more bytes than a histogram."""
    return min(1024, 4 * counters_for(ranks))


@dataclass(frozen=True)
class Winners:
    """Who holds the k largest magnitudes.

    Attributes
    ----------
    counts
        How many winners each rank holds; the same list on all ranks. A rank's winners are its
        largest values; ties go to the lowest index.
    threshold
        Larger magnitudes win, smaller ones lose, and of equal ones the lowest indices win. 0 if
        all values are zero.
    finite
        Whether the values of all ranks were finite; if not, there are no winners.
    """

    counts: list[int]
    threshold: float
    finite: bool


@dataclass(frozen=True)
class _Bin:
    """The magnitudes whose bits begin with ``prefix``; the k-th largest magnitude is among them.

    ``shift`` bits follow the prefix. ``inside`` magnitudes are in the bin, and ``needed`` of them
    win. All larger magnitudes win too.
    """

    prefix: int
    shift: int
    inside: int
    needed: int

    @property
    def lowest(self) -> int:
        """The bits of the smallest magnitude of the bin."""
        return self.prefix << self.shift


@timed("select")
def global_topk(
    values: Tensor, comm: Communicator, k: int, limit: int, finite: bool | Tensor
) -> Winners:
    """Find the k largest magnitudes of all ranks' values, by a radix select over the ranks.

    Ranks sum histograms of the leading bits until few candidates share a bin with the k-th
    largest. They then gather the candidates, and the counts of larger magnitudes.

    Parameters
    ----------
    values
        ``[m]`` float, any m. Lower ranks hold lower indices. Zeros never win.
    k
        min(k, nonzero values) values win.
    limit
        The most values that all ranks together can have; the same on all ranks.
    finite
        False if this rank's values are void.
    """
    flag = finite & finite_flag(values)
    width = 8 * values.element_size() - 1
    counts, finite = _histogram(values, comm, limit, width, None, flag)
    found = _locate(counts, 0, width, min(k, int(counts.sum())))
    if finite and found.needed:  # the others are too small, and values may be many
        _, values = kernels.threshold_select(values, _magnitude(found.lowest, values.dtype))
    while finite and found.needed < found.inside and found.inside > few(comm.size) and found.shift:
        counts, _ = _histogram(values, comm, limit, found.shift, found.prefix, True)
        found = _locate(counts, found.prefix, found.shift, found.needed)
    if not finite:
        return Winners([0] * comm.size, 0.0, False)
    return _share_out(found, values, comm, limit)


def _histogram(
    values: Tensor,
    comm: Communicator,
    limit: int,
    shift: int,
    prefix: int | None,
    finite: bool | Tensor,
) -> tuple[Tensor, bool]:
    """Count how often each value of the next bits occurs in the magnitudes, summed over ranks."""
    first, more = histogram_bits(comm.size)
    bits = min(shift, first if prefix is None else more)
    counts = kernels.magnitude_histogram(values, shift - bits, 1 << bits, prefix)
    return sum_counts(counts, comm, limit, finite)


def _locate(counts: Tensor, prefix: int, shift: int, needed: int) -> _Bin:
    """Find the bin that contains the ``needed``-th largest magnitude."""
    largest_first = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(largest_first, needed))
    bits = counts.numel().bit_length() - 1
    field = counts.numel() - 1 - place
    inside = int(counts[field])
    larger = int(largest_first[place]) - inside
    return _Bin(prefix << bits | field, shift - bits, inside, needed - larger)


def _share_out(found: _Bin, values: Tensor, comm: Communicator, limit: int) -> Winners:
    """Gather the candidates and the counts of larger magnitudes; count each rank's winners.

    There are no zeros among ``values``.
    """
    # If all candidates win or all are equal, their number is enough.
    listed = found.shift > 0 and found.inside <= few(comm.size)
    larger, inside, candidates = kernels.in_bin(
        values, found.lowest, 1 << found.shift, found.inside if listed else 0
    )
    dtype = torch.int32 if max(limit, 1 << found.shift) <= 1 << 31 else torch.int64
    numbers = torch.cat([torch.tensor([larger, inside], device="cpu"), candidates]).to(dtype)
    gathered, _ = gather_integers(numbers, comm, 2 + found.inside * listed)

    counts = torch.stack([numbers[:2] for numbers in gathered])  # [P, 2]
    if listed:
        rests = torch.cat([numbers[2:] for numbers in gathered])
        owners = torch.arange(comm.size).repeat_interleave(counts[:, 1])
        copies = torch.ones_like(rests)
    else:
        rests, owners, copies = torch.zeros(comm.size), torch.arange(comm.size), counts[:, 1]
    # The sort is stable, so ties go to the lower ranks, whose indices are lower.
    rests, order = rests.sort(descending=True, stable=True)
    ahead = copies[order].cumsum(0) - copies[order]
    winning = torch.minimum((found.needed - ahead).clamp(min=0), copies[order])
    won = counts[:, 0].index_add(0, owners[order], winning).tolist()
    if not found.needed:
        return Winners(won, 0.0, True)
    threshold = found.lowest + int(rests[winning > 0][-1])
    return Winners(won, _magnitude(threshold, values.dtype), True)


def _magnitude(bits: int, dtype: torch.dtype) -> float:
    """Return the value with these bits."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.tensor([bits], dtype=integers).view(dtype).item()
