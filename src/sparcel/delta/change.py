"""What changes in a tensor, as readers are told."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Change:
    """What changes in a tensor.

    Attributes
    ----------
    name, dtype, shape
        Of the whole tensor.
    indices
        int64, ``[k]``: the elements that change, counted row by row.
    values
        ``[k]``, of the tensor's dtype: their new values; None if the tensor is gone.
    new
        Whether the tensor was not there before. It is new as a whole, in one or several changes.
    tied_to
        The first name of a tied tensor, which is told under all its names, if this is another one.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    indices: Tensor
    values: Tensor | None
    new: bool = False
    tied_to: str | None = None

    @classmethod
    def gone(cls, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Change:
        """Return the change that takes a tensor away."""
        return cls(name, dtype, shape, torch.empty(0, dtype=torch.int64), None)
