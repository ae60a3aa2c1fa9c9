"""All-reduce of the dense vector by the engine: the baseline of every method."""

from __future__ import annotations

from torch import Tensor

from sparcel.core.device import all_of
from sparcel.core.formats import Expected
from sparcel.core.ops import SUM, Op
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire, collective


@collective
def dense(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks with the engine's own all-reduce; ``max_nnz`` is ignored.

    `check_agreement` comes first. Words a rank: 2n(P−1)/P for a ring.
    """
    finite = check_agreement(stream, wire)
    fill = op.neutral_for(stream.dtype)
    total = stream.values.clone() if stream.is_dense else stream.to_dense(fill)
    wire.comm.all_reduce(total, op)
    return SparseStream.unchecked(None, total, stream.size, finite)


def check_agreement(stream: SparseStream, wire: Wire) -> bool | Tensor:
    """Compare the ranks' headers, because the engine may hang or crash if sizes differ.

    Returns whether the streams of all ranks are finite.

    Raises
    ------
    MismatchError
        When sizes, dtypes or widths differ.
    """
    empty, wire = stream.empty_like(), wire.exact
    streams = wire.gather(wire.pack(empty), [Expected.like(empty, max_nnz=0)] * wire.size)
    return all_of([other.finite for other in streams])
