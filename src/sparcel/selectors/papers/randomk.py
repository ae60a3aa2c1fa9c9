"""Random-k: k random coordinates, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel import device, kernels
from sparcel._checks import checked_whole
from sparcel.selectors.base import Selector, reaching, stream_of
from sparcel.selectors.draws import distinct
from sparcel.stream import SparseStream


@dataclass(eq=False)
class RandomK(Selector):
    """The nonzeros among min(k, size) coordinates that are drawn without replacement.

    All coordinates are equally likely, whatever their values. Ranks with the same seed draw the
    same coordinates in the same step. Time and memory grow with k, not with the size.

    Parameters
    ----------
    seed
        Decides, with the step, which coordinates are drawn.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        self.seed = checked_whole(self.seed, "seed")

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Draw coordinates, and leave out those that are zero."""
        size = x.numel()
        drawn = distinct(min(k, size), size, self.seed, step)
        places = device.put(drawn, x.device, kernels.index_dtype(size))
        return stream_of(*reaching(places, x.index_select(0, places), 0), x)
