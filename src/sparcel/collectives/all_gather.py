"""All-gather: every rank receives the streams of all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from sparcel.formats import Expected
from sparcel.stages import Problem, Stage, Work, copied, gather_stages
from sparcel.stream import SparseStream
from sparcel.wire import Wire, collective


@collective
def all_gather(stream: SparseStream, wire: Wire, max_nnz: int | None = None) -> list[SparseStream]:
    """Return a list of the streams of all ranks; size, dtype and width must agree.

    Sparse streams are never made dense, because absent coordinates would become explicit zeros.
    ``max_nnz`` bounds the entries of each; if they are few, few ranks send them straight to all.

    A rank receives the P−1 other streams and sends P−1 streams: see `Wire.gather_messages`.
    Source: SparCML, section 5.2 (allgather).
    """
    expected = [Expected.like(stream, max_nnz, stays_sparse=True)] * wire.size
    return wire.gather(wire.pack(stream), expected)


def stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of `all_gather`."""
    blocks = [problem.sparse_message(problem.entries([rank])) for rank in problem.everyone]
    at_most = problem.format.nbytes(problem.size, problem.size, problem.itemsize)
    yield Work("encode", blocks[problem.rank])
    yield from gather_stages(blocks, problem.rank, at_most)
    yield copied(problem.k, times=problem.ranks)
