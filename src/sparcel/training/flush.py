"""What the memory of an earlier scheme owes, added to exchanges of a scheme without memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from sparcel.memory import Range
from sparcel.training.layout import Piece

FLUSH_STEPS = 16
"""Over how many steps memory is flushed."""


class Flush:
    """What is owed, by tensor name, and the steps in which it is paid in equal shares.

    A step adds its share to the gradients that are exchanged. When it takes effect, the share is no
    longer owed; with the last one the tensor is freed.
    """

    def __init__(self) -> None:
        self.owed: dict[str, Tensor] = {}
        self.steps = FLUSH_STEPS
        """How many steps are left, or will be needed if nothing is flushed yet."""

    def add_to(
        self, vector: Tensor, pieces: Iterable[Piece], withheld: Sequence[Range], scale: float
    ) -> list[str]:
        """Add this step's share, times ``scale``, to the gradients in a flat vector.

        Nothing is added to ``withheld`` ranges, whose updates the driver may throw away. These
        tensors are flushed whole once they take part again.

        Returns
        -------
        list
            The names of the tensors to `commit` if the step takes effect.
        """
        added = []
        for piece in pieces:
            place = piece.start, piece.stop
            if piece.name in self.owed and place not in withheld:
                vector[slice(*place)].add_(self.owed[piece.name], alpha=scale / self.steps)
                added.append(piece.name)
        return added

    def commit(self, added: Iterable[str]) -> float:
        """Take the shares that were added off what is owed, and return the sum of their |x|."""
        flushed = 0.0
        for name in added:
            owed = self.owed[name]
            flushed += float(owed.abs().sum()) / self.steps
            if self.steps == 1:
                del self.owed[name]
            else:
                owed.mul_(1 - 1 / self.steps)
        self.steps = max(1, self.steps - 1) if self.owed else FLUSH_STEPS
        return flushed
