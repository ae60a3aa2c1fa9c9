"""All-reduce for large data: owners reduce their regions, then all gather the regions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel import formats
from sparcel._checks import all_finite
from sparcel.collectives._transfer import (
    decode_from,
    gather_messages,
    region_boundaries,
)
from sparcel.collectives.reduce_scatter import reduce_scatter
from sparcel.comm import Communicator
from sparcel.ops import SUM, Op
from sparcel.stream import SparseStream, concatenate


@dataclass(frozen=True)
class Quantized:
    """The outcome of a quantised all-reduce: the sum, the same on all ranks, and what it lost.

    ``error`` is the exact minus the quantised sum, dense, over the region that starts at
    coordinate ``start`` and that this rank owns; None where nothing was quantised.
    """

    total: SparseStream
    start: int
    error: Tensor | None


def split_allgather(
    stream: SparseStream, comm: Communicator, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks in two phases.

    An owner knows the exact count of its reduced region and sends it sparse or dense, whichever is
    smaller (SSAR and DSAR in one); nobody guesses the result's density.

    Rounds: P−1 + ⌈log₂P⌉. Words a rank: at most 2k, then at most 2K(P−1)/P for K coordinates of
    the result spread evenly, and never more than n(P−1)/P.
    Source: SparCML, sections 5.3.2 and 5.3.3 (SSAR_Split_allgather, DSAR_Split_allgather).
    """
    region = reduce_scatter(stream, comm, op, max_nnz)
    return _gather_regions(formats.encode(region), stream, comm, op, max_nnz)


def quantized_split_allgather(
    stream: SparseStream,
    comm: Communicator,
    quantizer: formats.Qsgd,
    seed: int,
    max_nnz: int | None = None,
) -> Quantized:
    """Sum over all ranks; regions that became dense travel in few bits in the second phase.

    Parameters
    ----------
    seed
        With the coordinate's number it decides the random rounding; pass another at every call.

    Source: SparCML, section 6 (quantisation in DSAR's dense phase alone).
    """
    region = reduce_scatter(stream, comm, SUM, max_nnz)
    start = region_boundaries(stream.size, comm.size)[comm.rank]
    error = None
    if region.is_dense and region.finite and region.size:
        message = quantizer.encode(region, seed, start)
        error = region.values - formats.decode(message, region).values
        if not all_finite(error):  # the sum overflowed: nobody may remember it
            region.finite, error = False, None
    if error is None:
        message = formats.encode(region)
    total = _gather_regions(message, stream, comm, SUM, max_nnz)
    return Quantized(total, start, error)


def _gather_regions(
    message: Tensor, like: SparseStream, comm: Communicator, op: Op, max_nnz: int | None
) -> SparseStream:
    """Gather the owners' messages and join the regions that they hold."""
    boundaries = region_boundaries(like.size, comm.size)
    largest = -(-like.size // comm.size)
    bound = None if max_nnz is None else max_nnz * comm.size
    at_most = formats.max_bytes(largest, like.dtype, like.width, bound)
    parts = [
        decode_from(rank, part, like.empty_like(boundaries[rank + 1] - boundaries[rank]), comm)
        for rank, part in enumerate(gather_messages(message, comm, at_most))
    ]
    return concatenate(parts, op)
