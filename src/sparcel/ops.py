"""Reduction operations: an associative, commutative function and its neutral element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel.errors import InputError


@dataclass(frozen=True)
class Op:
    """An operation that streams can be reduced with.

    Parameters
    ----------
    function
        Elementwise ``(Tensor, Tensor) -> Tensor``, associative and commutative. Both arguments
        have the same shape and dtype; the first holds the contribution of the lower ranks.
    neutral
        The value that changes nothing. An absent coordinate of a stream stands for it. For integer
        dtypes, ``float("inf")`` and ``float("-inf")`` mean the dtype's largest and smallest value.
    name
        Selects a compiled kernel. Only the built-in operations have one.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    neutral: float
    name: str | None = None

    def neutral_for(self, dtype: torch.dtype) -> float:
        """Return the neutral element as a Python number that ``dtype`` can hold."""
        if dtype.is_floating_point:
            return self.neutral
        if self.neutral in (float("inf"), float("-inf")):
            limits = torch.iinfo(dtype)
            return limits.max if self.neutral > 0 else limits.min
        return int(self.neutral)


SUM = Op(torch.add, 0, "sum")
PRODUCT = Op(torch.mul, 1, "product")
MIN = Op(torch.minimum, float("inf"), "min")
MAX = Op(torch.maximum, float("-inf"), "max")

_BY_NAME = {op.name: op for op in (SUM, PRODUCT, MIN, MAX)}


def resolve(op: str | Op) -> Op:
    """Return the operation that ``op`` names, or ``op`` itself.

    Raises
    ------
    InputError
        When no operation has that name.
    """
    if isinstance(op, Op):
        return op
    if not isinstance(op, str) or op not in _BY_NAME:
        names = ", ".join(str(name) for name in _BY_NAME)
        raise InputError(f"op must be one of {names} or a sparcel.Op, got {op!r}")
    return _BY_NAME[op]
