"""All-reduce by name, and by whichever algorithm is predicted to be the fastest."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from sparcel.core import cost
from sparcel.core.collectives import ALGORITHMS
from sparcel.core.comm import Call, Communicator
from sparcel.core.cost.formulas import fastest
from sparcel.core.device import finite_flag
from sparcel.core.formats import RAW, Format
from sparcel.core.ops import SUM, Op
from sparcel.core.rates import Rates
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire, collective


@collective
def all_reduce(
    stream: SparseStream,
    wire: Wire,
    op: Op = SUM,
    algorithm: str = "auto",
    max_nnz: int | None = None,
) -> SparseStream:
    """Run the all-reduce of that name, inside a job of the wire's communicator."""
    if algorithm == "auto":
        algorithm, max_nnz = _choose(stream, wire, op, max_nnz)
    return ALGORITHMS[algorithm](stream, wire, op, max_nnz)


def sum_whole(vector: Tensor, comm: Communicator) -> SparseStream:
    """Return the sum over ranks of dense vectors, exactly, inside a job; all ranks call.

    Short vectors go straight to all ranks and travel as they are, without a format: what makes a
    message of a stream, and a stream of a message, would take longer than to send it. NaN and Inf
    of any rank stay in the sum, also where it counts as ``finite``.

    Raises
    ------
    MismatchError
        When sizes or dtypes differ.
    """
    size, ranks = vector.numel(), comm.size
    width, rates = vector.element_size(), comm.rates
    if ranks > 2 and _fastest_for(size, size, ranks, width, True, RAW, rates) != "allgather":
        stream = SparseStream.unchecked(None, vector, size, finite_flag(vector))
        return all_reduce(stream, Wire(comm), max_nnz=size)
    return comm.call(_whole_sum(size, vector.dtype), partial(_sum_gathered, vector, comm))


@lru_cache(maxsize=1024)
def _whole_sum(size: int, dtype: torch.dtype) -> Call:
    return Call.of("sum_whole", {"size": size, "dtype": dtype})


def _sum_gathered(vector: Tensor, comm: Communicator) -> SparseStream:
    """Add up the vectors of all ranks, in their order, so that all have the same bits."""
    blocks = comm.gather_blocks(vector.view(torch.uint8), [vector.nbytes] * comm.size)
    total, *others = blocks.view(vector.dtype).split(vector.numel())
    for other in others:
        total += other
    return SparseStream.unchecked(None, total, vector.numel())


def _choose(
    stream: SparseStream, wire: Wire, op: Op, max_nnz: int | None
) -> tuple[str, int | None]:
    """Name the algorithm that "auto" stands for, from what all ranks know alike.

    Returns the name, and the most entries that any rank has. The ranks tell each other their counts
    if ``max_nnz`` is None.
    """
    if wire.size <= 2 or stream.size == 0:
        # With two ranks, nothing is faster than that each sends its stream to the other.
        return "recursive_doubling", max_nnz
    if max_nnz is None:
        # A few bytes; a wrong choice costs more.
        max_nnz = max(wire.comm.gather_numbers(stream.nnz))
    k = min(_rounded(max(1, max_nnz)), stream.size)
    value_bytes = max(1, stream.value_bytes)
    # The engine's own sum does not travel in the wire's format.
    by_engine = op.name is not None and not wire.format.loses
    rates = wire.comm.rates
    return _fastest_for(
        stream.size, k, wire.size, value_bytes, by_engine, wire.format, rates
    ), max_nnz


@lru_cache(maxsize=4096)
def _fastest_for(
    size: int,
    k: int,
    ranks: int,
    value_bytes: int,
    by_engine: bool,
    format: Format,
    rates: Rates | None,
) -> str:
    """Name the fastest algorithm; cached, because a prediction takes longer than a small sum."""
    rates = rates or cost.default_rates()
    here = min(ranks, rates.ranks_per_node)
    problem = cost.Problem(size, k, ranks, here, value_bytes, format=format)
    return fastest(problem, rates, by_engine)


@lru_cache(maxsize=4096)
def fastest_format(size: int, k: int, rates: Rates | None) -> Format:
    """Return the exact format in which ``k`` of ``size`` float32 coordinates take the least time.

    To pack and unpack an index takes about as long as to merge an entry.
    """
    rates = rates or cost.default_rates()
    packed = Format("packed")
    plain_bytes, packed_bytes = (one.nbytes(k, size, 4) for one in (RAW, packed))
    saved = rates["shift"](plain_bytes) - rates["shift"](packed_bytes)
    return packed if saved > rates["merge"](k) else RAW


def _rounded(count: int) -> int:
    """Round up to 4 significant bits, so that counts about alike are looked up as one."""
    dropped = max(0, count.bit_length() - 4)
    return -(-count >> dropped) << dropped
