"""What the memory of an earlier scheme owes, added to exchanges of a scheme without memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sparcel.device import read
from sparcel.memory import Range
from sparcel.training.layout import Piece
from sparcel.training.ranks import Ranks

FLUSH_STEPS = 16
"""Over how many steps memory is flushed."""


class Flush:
    """What is owed, by tensor name, and the steps in which it is paid in equal shares.

    A step adds its share to the gradients that are exchanged. When it takes effect, what the
    gradients have gained is no longer owed. The last step adds all that is left, and frees the
    memory of the tensors that it has added.
    """

    def __init__(self) -> None:
        self.owed: dict[str, Tensor] = {}
        self.pending = False
        """Whether some rank may still have to flush something; the same on all ranks."""
        self.steps = FLUSH_STEPS
        """How many steps are left, or will be needed if nothing is flushed yet; the same on all
        ranks. A rank whose gradients were withheld repeats the last one."""

    def add_to(
        self, vector: Tensor, pieces: Iterable[Piece], withheld: Sequence[Range], scale: float
    ) -> dict[str, Tensor]:
        """Add this step's share, times ``scale``, to the gradients in a flat vector.

        Nothing is added to ``withheld`` ranges, whose updates the driver may throw away. These
        tensors are flushed whole once they take part again.

        Returns
        -------
        dict
            What these tensors owe if the step takes effect. A share that a gradient in half
            precision is too large to gain stays owed.
        """
        left = {}
        for piece in pieces:
            if piece.name in self.owed and piece.place not in withheld:
                owed, gradient = self.owed[piece.name], piece.of(vector)
                rest = gradient.to(owed.dtype, copy=True)
                gradient.add_(owed, alpha=scale / self.steps)
                left[piece.name] = rest.sub_(gradient).div_(scale).add_(owed)
        return left

    def will_owe(self, left: Mapping[str, Tensor], ranks: Ranks) -> bool:
        """Return whether some rank may owe something after this step.

        All ranks call, inside a job, if something is pending. Only the last step asks them.
        """
        if self.steps > 1:
            return True
        kept = len(self.owed.keys() - left.keys())
        return any(ranks.tell("flush", kept))

    def commit(self, left: Mapping[str, Tensor], pending: bool) -> float:
        """Let a step take effect, and return by how much the sum of what is owed shrank, in |x|.

        ``left`` is what `add_to` returned of all vectors, ``pending`` what `will_owe` did. The
        result is NaN where the sum overflows.
        """
        shrunk: list[Tensor] = []
        for name, rest in left.items():
            shrunk.append(self.owed.pop(name).abs().sum())
            if self.steps > 1:
                self.owed[name] = rest
                shrunk.append(-rest.abs().sum())
        self.steps = max(1, self.steps - 1) if pending else FLUSH_STEPS
        self.pending = pending
        return sum(read(torch.stack(shrunk)).tolist()) if shrunk else 0.0
