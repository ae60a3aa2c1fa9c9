"""Reduction operations: an associative, commutative function and its neutral element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel.errors import InputError


@dataclass(frozen=True, repr=False)
class Op:
    """An operation that streams can be reduced with.

    Parameters
    ----------
    function
        Elementwise ``(Tensor, Tensor) -> Tensor``, associative and commutative. Both arguments
        have the same shape and dtype, which the result must have as well; the first holds the
        contribution of the lower ranks.
    neutral
        The value that changes nothing. An absent coordinate of a stream stands for it. For integer
        dtypes, ``float("inf")`` and ``float("-inf")`` mean the dtype's largest and smallest value.
    name
        Selects a compiled kernel. Only the built-in operations have one.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    neutral: float
    name: str | None = None

    def __repr__(self) -> str:
        """Return a text that is the same in every process, so it tells no address."""
        if self.name is not None:
            return self.name
        kind = type(self.function).__qualname__
        return f"Op({getattr(self.function, '__qualname__', kind)}, neutral={self.neutral})"

    def apply(self, first: Tensor, second: Tensor) -> Tensor:
        """Return ``function(first, second)``; both tensors have the same shape and dtype.

        Raises
        ------
        InputError
            When the function returns another shape or dtype, which would be broadcast or cast.
        """
        result = self.function(first, second)
        if not isinstance(result, Tensor) or (result.shape, result.dtype) != (
            first.shape,
            first.dtype,
        ):
            raise InputError(
                f"the function of {self} must be elementwise and keep the dtype: given two of"
                f" {_kind(first)}, it returned {_kind(result)}"
            )
        return result

    def neutral_for(self, dtype: torch.dtype) -> float:
        """Return the neutral element as a Python number that ``dtype`` can hold."""
        if dtype.is_floating_point:
            return self.neutral
        if self.neutral in (float("inf"), float("-inf")):
            limits = torch.iinfo(dtype)
            return limits.max if self.neutral > 0 else limits.min
        return int(self.neutral)


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} of shape {tuple(value.shape)}"


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
