"""All-reduce by gathering every rank's stream and reducing them locally."""

from __future__ import annotations

from collections.abc import Iterator

from sparcel.ops import SUM, Op
from sparcel.stages import Problem, Stage, Work, gather_stages, made_dense, merge_all
from sparcel.stream import SparseStream
from sparcel.wire import Wire, collective


@collective
def allgather(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks; every rank reduces all P streams, in the order of the ranks.

    Words a rank: 2k(P−1). Best if indices hardly overlap and P is small.
    Source: gTop-k, Algorithm 1 (TopKAllReduce); SparCML, section 5.3, case (1).
    """
    total = wire.gather_and_reduce(wire.compact(stream, op), max_nnz, op)
    return wire.compact(total, op)


def stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of `allgather`."""
    blocks = [problem.message(problem.entries([rank])) for rank in problem.everyone]
    yield Work("encode", blocks[problem.rank])
    yield from gather_stages(blocks, problem.rank, problem.most_bytes(problem.k))
    yield from merge_all(problem, 0, problem.size)
    yield from made_dense(problem, problem.entries(problem.everyone), problem.size)
