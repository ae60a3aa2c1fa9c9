"""What all selectors share: from a dense vector to a sparse stream and the rest of the vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from sparcel import kernels
from sparcel.errors import InputError
from sparcel.stream import SparseStream


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
