"""All-reduce of the dense vector by the engine: the baseline that every method must beat."""

from __future__ import annotations

from sparcel import formats
from sparcel.collectives._transfer import decode_from, gather_messages
from sparcel.comm import Communicator
from sparcel.ops import SUM, Op
from sparcel.stream import SparseStream


def dense(
    stream: SparseStream, comm: Communicator, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks with the engine's own all-reduce; ``max_nnz`` does not matter.

    Rounds: ⌈log₂P⌉ for `check_agreement`, then the engine's. Words a rank: 2n(P−1)/P for a ring.
    """
    finite = check_agreement(stream, comm)
    fill = op.neutral_for(stream.dtype)
    total = stream.values.clone() if stream.is_dense else stream.to_dense(fill)
    comm.all_reduce(total, op)
    return SparseStream.unchecked(None, total, stream.size, finite)


def check_agreement(stream: SparseStream, comm: Communicator) -> bool:
    """Compare the ranks' headers, for an engine that hangs or dies when given two sizes.

    Returns whether the streams of all ranks are finite.

    Raises
    ------
    MismatchError
        When sizes, dtypes or widths differ.
    """
    empty = stream.empty_like()
    greeting = formats.encode(empty)
    messages = gather_messages(greeting, comm, greeting.numel())
    streams = [decode_from(rank, part, empty, comm) for rank, part in enumerate(messages)]
    return all(other.finite for other in streams)
