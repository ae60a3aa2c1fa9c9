"""Selectors: from a dense vector to a sparse stream and its rest; exact top-k; random draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core._checks import FLOAT_DTYPES, Array, as_tensor, checked_whole
from sparcel.core.kernels.definitions.few_bits import philox
from sparcel.core.stream import SparseStream
from sparcel.errors import InputError


@dataclass(eq=False)
class Selector(ABC):
    """Decides which coordinates of a dense vector go into a stream.

    What a selector returns is sparse, sorted, and without zeros. Nothing that it allocates is as
    large as the vector. Random draws depend on its seed and the step alone, so a step that is
    repeated selects the same, on any rank.
    """

    @abstractmethod
    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Select about ``k`` coordinates; each selector says how many exactly.

        Parameters
        ----------
        x
            ``[size]``, contiguous, any float dtype, finite; left as it was.
        k
            How many are asked for, at least 1.
        step
            How many steps have committed: decides random draws and when thresholds are renewed.

        Returns
        -------
        SparseStream
            The selected coordinates with the values of ``x``, in its dtype.
        """

    def most(self, k: int, size: int) -> int:
        """Return the most coordinates that `select` can return, whatever the vector holds."""
        return min(k, size)

    def take(self, addition: kernels.Addition, k: int, step: int = 0) -> SparseStream:
        """Add, select from the sum, and leave the rest of it in the scratch.

        Parameters
        ----------
        addition
            The vectors ``[size]``. The scratch gets their sum, and 0 where an entry was selected.
        k, step
            As for `select`.

        Returns
        -------
        SparseStream
            Not finite, and empty, where the sum is not finite; the scratch then means nothing.
        """
        scratch = addition.scratch
        *_, finite = kernels.accumulate_topk(addition, 0)
        if finite is False:
            dtype = kernels.index_dtype(scratch.numel())
            nothing = torch.empty(0, dtype=dtype, device=scratch.device)
            return stream_of(nothing, scratch[:0], scratch, finite=False)
        stream = self.select(scratch, k, step)
        assert stream.indices is not None, "selections are sparse"
        kernels.scatter(scratch, stream.indices, torch.zeros_like(stream.values))
        stream.finite = finite
        return stream

    def fresh(self) -> Self:
        """Return a selector with the same settings that remembers nothing."""
        return replace(self)

    def state_dict(self) -> dict[str, Any]:
        """Return what the selector remembers from step to step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; raise `InputError` for what it did not."""
        if state:
            raise InputError(
                f"{self} remembers nothing, got a state with {', '.join(map(repr, state))}; load"
                " it for the selector that saved it"
            )


def stream_of(
    indices: Tensor, values: Tensor, vector: Tensor, finite: bool | Tensor = True
) -> SparseStream:
    """Make the stream of what was selected from ``vector``."""
    return SparseStream.unchecked(indices, values, vector.numel(), finite)


def reaching(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the nonzero entries that reach a magnitude, which is rounded to their dtype."""
    positions, values = kernels.threshold_select(values, threshold)
    return indices.index_select(0, positions), values


def overlap(selection: SparseStream, exact: SparseStream) -> float:
    """Return the share of the coordinates of ``exact`` that are also in ``selection``, in [0, 1].

    Parameters
    ----------
    selection, exact
        Sparse streams of one size. If ``exact`` is empty, the share is 1.
    """
    assert selection.indices is not None and exact.indices is not None, "selections are sparse"
    if exact.nnz == 0:
        return 1.0
    return float(torch.isin(exact.indices, selection.indices).sum()) / exact.nnz


@dataclass(eq=False)
class Ranked(Selector):
    """Selects ``count`` of every ``chunk`` consecutive coordinates, or of all, exactly.

    Each chunk gives min(count, nnz of the chunk); the last chunk may be short. Ties go to the
    lowest index. Selecting from memory + gradient takes one pass over the vectors.
    """

    @abstractmethod
    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Return ``(count, chunk)``; the chunk is None if the whole vector is one chunk."""

    def most(self, k: int, size: int) -> int:
        """Return ``count`` for each full chunk, plus what the short last chunk can give."""
        count, chunk = self.rule(k, size)
        if chunk is None:
            return min(count, size)
        full, rest = divmod(size, chunk)
        return full * min(count, chunk) + min(count, rest)

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        """Select by the rule."""
        count, chunk = self.rule(k, x.numel())
        if chunk is None:
            return stream_of(*kernels.topk(x, count), x)
        return stream_of(*kernels.topk_chunked(x, count, chunk), x)

    def take(self, addition: kernels.Addition, k: int, step: int = 0) -> SparseStream:
        """Add, select and clear in one pass."""
        count, chunk = self.rule(k, addition.memory.numel())
        indices, values, finite = kernels.accumulate_topk(addition, count, chunk)
        if finite is False:
            indices, values = indices[:0], values[:0]
        return stream_of(indices, values, addition.scratch, finite)


@dataclass(eq=False)
class ExactTopK(Ranked):
    """The ``min(k, nnz)`` coordinates of largest magnitude; ties go to the lowest index."""

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Select k of the whole vector."""
        return k, None


def topk(x: Array, k: int) -> SparseStream:
    """Select the ``min(k, nnz)`` coordinates of largest magnitude, exactly.

    Parameters
    ----------
    x
        ``[size]``, float16, bfloat16, float32 or float64; a tensor, or an array of NumPy.
    k
        How many to select, at least 1. Ties go to the lowest index; zeros are never selected.

    Returns
    -------
    SparseStream
        Sparse, with the values of ``x`` at the selected coordinates.

    Raises
    ------
    InputError
        When ``x`` is not a one-dimensional float tensor, or ``k < 1``.
    """
    x = as_tensor(x, "x")
    if x.ndim != 1 or x.dtype not in FLOAT_DTYPES:
        raise InputError(
            f"topk selects from a one-dimensional float tensor, got {x.dtype} of shape"
            f" {tuple(x.shape)}; flatten it first"
        )
    return ExactTopK().select(x.detach().contiguous(), checked_whole(k, "k", at_least=1))


def integers(count: int, below: int, seed: int, step: int) -> Tensor:
    """Return int64 ``[count]``, each uniform in ``[0, below)``, decided by seed and step alone.

    Numbers are 63 random bits modulo ``below``; their probabilities differ by less than
    below/2**63. A longer sequence begins with the shorter one.
    """
    # The random rounding of values may use the same seed; its counters are below 2**32.
    first = (step + 1) << 32
    blocks = torch.arange(first, first + (count + 1) // 2, device="cpu")
    a, b, c, d = philox(blocks, seed)
    bits = torch.stack([(a << 31) | (b >> 1), (c << 31) | (d >> 1)], dim=1).view(-1)
    return bits[:count] % below


def distinct(count: int, below: int, seed: int, step: int) -> Tensor:
    """Return ``count`` different numbers in ``[0, below)``, sorted; each set is equally likely.

    They are the first ``count`` different numbers in the sequence of `integers`. If ``count``
    is more than half of all numbers, the others are drawn, and left out. Memory grows with
    ``count``.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if 2 * count > below:
        left = torch.ones(below, dtype=torch.bool, device="cpu")
        left[distinct(below - count, below, seed, step)] = False
        return left.nonzero().view(-1)
    # Up to one half, the expected length of the sequence is 2·ln 2 times the count at most.
    length = count + count // 2 + 64
    while True:
        drawn, position = integers(length, below, seed, step).sort(stable=True)
        first = torch.ones_like(drawn, dtype=torch.bool)
        torch.ne(drawn[1:], drawn[:-1], out=first[1:])
        drawn, position = drawn[first], position[first]
        if drawn.numel() >= count:
            return drawn[position.argsort()[:count]].sort().values
        length *= 2
