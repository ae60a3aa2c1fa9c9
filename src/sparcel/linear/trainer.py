"""What every solver does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from sparcel.linear.coordinates import Coordinates
from sparcel.linear.epoch import Epoch
from sparcel.rows.rows import Array

if TYPE_CHECKING:
    from sparcel.linear.sgd.whole import WholeModel


class Trainer(Protocol):
    """Trains a model that all ranks share; all of them call each function.

    Attributes
    ----------
    steps
        Steps an epoch.
    epochs
        Epochs so far.
    losses
        Mean losses of these epochs.
    """

    steps: int
    epochs: int
    losses: list[float]

    @property
    def mean_loss(self) -> float:
        """Mean loss as it is known now, alike on all ranks; NaN before the first step."""

    def epoch(self, after_step: Callable[[int], None] = ...) -> Epoch:
        """Train for one epoch."""

    def fitted(self, everywhere: bool = True) -> tuple[Coordinates, WholeModel | None]:
        """Return the model, and what SGD can go on from; on rank 0 alone unless ``everywhere``."""

    def forget_rows(self) -> None:
        """Give the rows' memory back; the model remains, and no epoch can follow."""

    def state(self) -> dict[str, Array]:
        """Return what `restore` goes on from, bit by bit. What rank 0 gets is complete.

        The next step may change it.
        """

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from the `state` that rank 0 gives, of a training with the same rows and settings.

        Raises
        ------
        InputError
            When it is of other rows.
        """

    def read(self) -> tuple[Array, Array]:
        """Return the model's coordinates ``[dimensions, width]`` and the intercepts, as copies."""
        coordinates, _ = self.fitted()
        return coordinates.dense(), coordinates.intercepts
