"""How ranks share an operation over tensors: pieces, who has which, and whether sharing pays."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise

import numpy as np
from torch import Tensor

from sparcel import cost, kernels
from sparcel.comm import digest
from sparcel.rates import Rates
from sparcel.stages import ROUND_OPERATIONS, Problem, Stage, Work, gather_stages

Sizes = tuple[tuple[int, int], ...]
"""The number of elements of each tensor, and the bytes of one."""

_ROW_BYTES = 8
"""Bytes of a row, which the cost model takes for one number."""

_TURN_SECONDS = 3e-3
"""How long a process runs before Linux lets another one have its core."""


@dataclass(eq=False)
class Division:
    """Pieces of tensors, and the ranks' shares of them.

    Attributes
    ----------
    sizes
        The tensors.
    additive
        Whether the result of a tensor is the sum of those of its pieces; then large ones are cut.
    pieces
        ``(tensor, start, stop)``, in order: the number of a tensor and a range of its elements.
    cuts
        Rank r has the pieces ``[cuts[r], cuts[r + 1])``.
    pays
        Whether the ranks should share the work, by the cost model.
    """

    sizes: Sizes
    additive: bool
    pieces: tuple[tuple[int, int, int], ...]
    cuts: tuple[int, ...]
    pays: bool = False

    @cached_property
    def owners(self) -> np.ndarray:
        """The tensor that each piece belongs to."""
        return np.array([tensor for tensor, *_ in self.pieces], np.int64)

    @cached_property
    def text(self) -> str:
        """The tensors in few words, to compare ranks by."""
        return f"{len(self.sizes)} tensors {digest(repr(self.sizes), 32):08x}"

    @cached_property
    def nbytes(self) -> list[int]:
        """Bytes of each piece."""
        return [(stop - start) * self.sizes[tensor][1] for tensor, start, stop in self.pieces]

    @property
    def loads(self) -> list[int]:
        """Bytes of each rank's share."""
        return [sum(self.nbytes[start:stop]) for start, stop in pairwise(self.cuts)]

    @property
    def counts(self) -> list[int]:
        """Pieces of each rank's share."""
        return [stop - start for start, stop in pairwise(self.cuts)]

    def share(self, rank: int) -> range:
        """Return the pieces of a rank; the smallest piece of all if it has none."""
        own = range(self.cuts[rank], self.cuts[rank + 1])
        if own:
            return own
        smallest = self.nbytes.index(min(self.nbytes))
        return range(smallest, smallest + 1)


@lru_cache(maxsize=64)
def divide(sizes: Sizes, ranks: int, additive: bool, rates: Rates | None) -> Division:
    """Divide tensors among the ranks by bytes; cached, because each step asks again.

    Only the arguments decide, so ranks with equal arguments divide alike. With ``additive`` large
    tensors are cut into chunks of `kernels.CHUNK` elements. A rank's share is then less than the
    mean and a chunk.
    """
    pieces = tuple(_pieces(sizes, additive))
    whole = Division(sizes, additive, pieces, (0, len(pieces)))
    # A piece goes to the rank in whose part of all bytes its middle lies.
    ends = list(accumulate(whole.nbytes))
    middles = [2 * end - piece for end, piece in zip(ends, whole.nbytes, strict=True)]
    total = ends[-1] if ends else 0
    bounds = [-(-2 * total * rank // ranks) for rank in range(1, ranks)]
    cuts = (0, *(bisect_left(middles, bound) for bound in bounds), len(pieces))
    divided = Division(sizes, additive, pieces, cuts)
    divided.pays = _seconds(divided, ranks, rates) < _seconds(whole, ranks, rates)
    return divided


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as a vector in the order of memory, which mostly needs no copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1).contiguous()


def _pieces(sizes: Sizes, cut: bool) -> Iterator[tuple[int, int, int]]:
    for tensor, (size, _) in enumerate(sizes):
        step = kernels.CHUNK if cut else max(size, 1)
        for start in range(0, max(size, 1), step):
            yield tensor, start, min(start + step, size)


def _seconds(divided: Division, ranks: int, rates: Rates | None) -> float:
    """Return the predicted time of an operation that is one pass over its tensors.

    A rank that waits for messages gives up its core. Where ranks share cores, or loaders run beside
    them, it gets the core back after a turn of each process in front of it, and all ranks wait for
    the last. Crowding tells how many share a core; where it was not measured, one other is assumed.
    """
    rates = cost.default_rates() if rates is None else rates
    problem = Problem(1, 1, ranks, min(ranks, rates.ranks_per_node))
    exchanging = cost.predict(partial(_steps, divided), problem, rates).seconds
    if len(divided.loads) == 1:
        return exchanging
    return exchanging + _TURN_SECONDS * (rates.crowding - 1 if rates.measured else 1)


def _steps(divided: Division, problem: Problem) -> Iterator[Stage]:
    yield Work("add", max(divided.loads) / 4)  # its coordinates are of float32
    blocks = [float(_ROW_BYTES * count) for count in divided.counts]
    yield from gather_stages(blocks, 0, max(blocks))
    if len(blocks) > 1:
        yield Work("small", ROUND_OPERATIONS)
