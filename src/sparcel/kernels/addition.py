"""The input of a selection that adds up what it selects from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor


@dataclass(frozen=True)
class Addition:
    """The sum ``memory + addend``, where ``addend = scale·gradient + momentum·velocity``.

    Parameters
    ----------
    memory
        ``[n]``, float32 or float64; not changed.
    gradient
        ``[n]``, float16, bfloat16, float32 or float64. It is converted to the dtype of ``memory``
        first, in which all is computed.
    scratch
        ``[n]``, the dtype of ``memory``; the sum is written there. It must not overlap the others.
    scale, momentum
        Rounded to the dtype of ``memory``.
    velocity
        ``[n]``, the dtype of ``memory``; not changed. None for zeros.
    entering
        ``[n]``, the dtype of ``memory``; the addend is written there. None writes it nowhere.
    clear
        Whether ``gradient`` is set to zero as it is read. This saves a pass over it.
    """

    memory: Tensor
    gradient: Tensor
    scratch: Tensor
    scale: float = 1.0
    momentum: float = 0.0
    velocity: Tensor | None = None
    entering: Tensor | None = None
    clear: bool = False

    def part(self, start: int, stop: int) -> Self:
        """Return the addition of the coordinates ``[start, stop)``."""
        return replace(
            self,
            memory=self.memory[start:stop],
            gradient=self.gradient[start:stop],
            scratch=self.scratch[start:stop],
            velocity=None if self.velocity is None else self.velocity[start:stop],
            entering=None if self.entering is None else self.entering[start:stop],
        )
