"""SparCML's Quantized TopK SGD: top-k selections, and a sum of values in few bits."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel._checks import whole_number
from sparcel.collectives.split_allgather import quantized_split_allgather
from sparcel.errors import InputError
from sparcel.formats import Qsgd
from sparcel.schemes.request import Request
from sparcel.schemes.sparsifier import Exchanged, Selection, Sparsifier
from sparcel.schemes.topk import exchange_topk
from sparcel.wire import Wire


@dataclass(eq=False)
class SparCML(Sparsifier):
    """The sum of the ranks' top-k selections, in few bits; without ``bits``, `TopK`.

    Parameters
    ----------
    bits
        8, 4 or 2: values travel in so many bits, with one scale for 512 of them (`Qsgd`), by split
        and all-gather: those that each rank selected, and their sum. Who rounds keeps the rounding
        error in its memory; the paper drops it. Uncompressed steps are rounded too. With 2 bits the
        errors exceed the values, and the memory grows to many times its size: prefer 4. None: full
        precision.
    seed
        Decides the random rounding, with the step, the rank and the value's position; the same on
        all ranks. By default 0; refused without ``bits``.

    The others are those of `Sparsifier`.
    Source: SparCML, Algorithm 1 and sections 6 and 8.3. Deviation: ranks select the largest of the
    whole vector; ``selector="bucketed"`` is that of the paper's experiments, the largest of every
    512 coordinates, which spreads the entries evenly, takes longer, and trains worse.
    """

    bits: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None:
            self.seed = whole_number(self.seed, "seed")
        self._quantizer: Qsgd | None = None
        if self.bits is not None:
            self.bits, self.seed = whole_number(self.bits, "bits"), self.seed or 0
            self._quantizer = Qsgd(self.bits, seed=self.seed)
        elif self.seed is not None:
            raise InputError(
                f"seed={self.seed} decides the rounding to few bits, and needs bits; pass bits=8, 4"
                " or 2, or leave out seed"
            )

    def _sends_all(self, request: Request) -> bool:
        return self._quantizer is None and super()._sends_all(request)

    def _exchange(self, selection: Selection, wire: Wire) -> Exchanged:
        if self._quantizer is None:
            return exchange_topk(selection, wire)
        sent, most = selection.stream, selection.most
        quantizer = self._quantizer.at_step(self.steps)
        outcome = quantized_split_allgather(sent, wire, quantizer, most)
        return Exchanged(outcome.total, sent, outcome.lost)
