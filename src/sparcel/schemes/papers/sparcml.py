"""SparCML's Quantized TopK SGD: top-k selections, and a sum of values in few bits."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel._checks import checked_whole
from sparcel.collectives.reduce_scatter import split_allgather
from sparcel.errors import InputError
from sparcel.formats import FewBits, Format
from sparcel.schemes.ledger import Ledger
from sparcel.schemes.selecting import Selecting
from sparcel.schemes.topk import exchange_topk
from sparcel.stream import SparseStream
from sparcel.wire import Wire


@dataclass(eq=False)
class SparCML(Selecting):
    """The sum of the ranks' top-k selections, in few bits; without ``bits``, `TopK`.

    Parameters
    ----------
    bits
        2 to 8: values travel in so many bits, rounded at random and without bias, with one
        float32 scale for 512 of them (QSGD), by split and all-gather: those that each rank
        selected, and their sum. Section 6 of the paper rounds the sum alone, where that is dense.
        Who rounds keeps the rounding error in its memory; the paper drops it. With 2 bits the
        errors exceed the values, and the memory grows to many times its size.
        The formats of `Selecting`, which round to nearest and have a scale for 64 values, train
        better. None: `Selecting`'s ``format``.
    seed
        Decides the random rounding, with the step, the rank and the value's position; the same on
        all ranks. By default 0; refused without ``bits``.

    The others are those of `Selecting`.
    Source: SparCML, Algorithm 1 and sections 6 and 8.3. Deviations: ranks select the largest of
    the whole vector; ``selector="bucketed"`` is that of the paper's experiments, the largest of
    every 512 coordinates, which spreads the entries evenly, takes longer, and trains worse. The
    memory holds gradients, where Algorithm 1 accumulates them times the learning rate.
    """

    bits: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None:
            self.seed = checked_whole(self.seed, "seed")
        if self.bits is not None:
            self.bits, self.seed = checked_whole(self.bits, "bits"), self.seed or 0
            if self.format not in (Format(), _paper_format(self.bits, self.seed)):
                raise InputError(
                    f"bits={self.bits} is a format of its own; leave out bits, or format"
                )
            self.format = _paper_format(self.bits, self.seed)
        elif self.seed is not None:
            raise InputError(
                f"seed={self.seed} decides the rounding to few bits, and needs bits; pass bits=4,"
                " or leave out seed"
            )

    def _exchange(self, ledger: Ledger, wire: Wire) -> SparseStream:
        if self.bits is None:
            return exchange_topk(ledger, wire)
        return split_allgather(ledger.sent, wire, max_nnz=ledger.most)


def _paper_format(bits: int, seed: int) -> Format:
    """Return the format of SparCML's experiments."""
    return Format("raw", FewBits(bits, 512, "float32", stochastic=True, seed=seed))
