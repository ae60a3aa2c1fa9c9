"""The global top-k of the ranks' streams, by a tree of pairwise sums and selections."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel.core import device, patterns
from sparcel.core.collectives.all_reduce import allgather
from sparcel.core.collectives.broadcast import tree_broadcast
from sparcel.core.device import finite_flag
from sparcel.core.formats import Expected
from sparcel.core.stream import SparseStream, reduce
from sparcel.core.wire import Wire, collective


@dataclass(frozen=True)
class GlobalTopk:
    """The largest coordinates of a sum over all ranks, and this rank's part of the others.

    ``total`` is sparse and the same on all ranks. ``dropped`` holds the sums, or partial sums,
    that this rank dropped. ``total`` plus all ranks' ``dropped``, and what their wires lost, is the
    sum of all inputs. If an input or a sum is not finite, ``total`` is not finite either.
    """

    total: SparseStream
    dropped: SparseStream

    @classmethod
    def void(cls, like: SparseStream) -> GlobalTopk:
        """Return the result where the sum is not finite: nothing wins, nothing is dropped."""
        return cls(like.void_like(), like.void_like())


@collective
def gtopk(stream: SparseStream, wire: Wire, k: int) -> GlobalTopk:
    """Sum pairs of streams up a tree, keep the k largest of each sum, and broadcast the root's.

    Parameters
    ----------
    stream
        Scalar float values. Only the k largest enter the first round.

    Words: at most 2k⌈log₂P⌉ each way, at the root.
    Source: gTop-k, Definition 1 (⊤) and Algorithm 3 (gTopKAllReduce). The paper needs P to be a
    power of two; this function takes any P. The paper forgets the partial sums that ranks drop;
    this function returns them.
    """
    total, rest = stream.topk(k)
    dropped = [rest]
    for parent, child, *_ in patterns.binomial_reduction(wire.rank, wire.size):
        if parent is not None:
            wire.exchange({parent: wire.pack(wire.compact(total))}, {})
        elif child is not None:
            arrived = wire.exchange({}, {child: Expected.like(total, k)})[child]
            pair = wire.reduce([total, arrived.stream])
            pair.finite = pair.finite & finite_flag(pair.values)
            total, rest = pair.topk(k)
            dropped.append(rest)
    winners = wire.compact(total) if wire.rank == 0 else None
    total = tree_broadcast(winners, wire, 0, Expected.like(stream, k))
    if total.is_dense:  # few bits may have made numbers of zeros
        total, rest = total.topk(k)
        if wire.rank == 0:
            dropped.append(rest)
    return GlobalTopk(total, reduce(dropped))


@collective
def gathered_topk(
    stream: SparseStream, wire: Wire, k: int, max_nnz: int | None = None
) -> GlobalTopk:
    """Gather every rank's stream, sum in the order of the ranks, and keep the k largest.

    The total is the global top-k of what the messages hold. Where the format rounds nothing,
    `oktopk` finds the same without gathering. If an input or the sum is not finite, the total is
    empty and not ``finite``. Rank r drops the sums in ``[r·n // P, (r+1)·n // P)`` that do not win.
    ``max_nnz`` bounds every rank's entries.

    Words a rank: 2(P−1) times the entries of a rank.
    Source: gTop-k, Algorithm 2.
    """
    total = allgather(stream, wire, max_nnz=max_nnz)
    if not device.truth(total.finite & finite_flag(total.values)):
        return GlobalTopk.void(stream)
    winners = total.largest(k)
    start, stop = patterns.cuts(stream.size, wire.size)[wire.rank : wire.rank + 2]
    region = total.slice(start, stop).placed(start, stream.size)
    return GlobalTopk(winners, region.without(winners))
