"""What an averager, its steps and its handle share."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sparcel.training.ahead import Ahead
from sparcel.training.policy import Treatment
from sparcel.training.ranks import Ranks
from sparcel.training.residuals import Residuals
from sparcel.training.stats import Tally

if TYPE_CHECKING:
    from sparcel.training.transaction import Transaction


@dataclass(eq=False)
class Session:
    """The exchange of a training's gradients, from its first step to its end.

    Attributes
    ----------
    ranks, device
        Who exchanges them, and where they are.
    scaler, frontload, withhold_zeros
        As for `sparcel.training.Averager`.
    treatment, residuals
        How each tensor is exchanged, which a switch of the scheme changes, and what is kept back.
    step
        The step that is being queued, if one is.
    tally
        What the steps have cost.
    ahead
        What tells where the memory would bring the parameters, if a driver has asked for it.
    closed
        Whether nothing can be exchanged any more.
    undo
        Callbacks that undo, at the end, what a driver has done to the user's objects.
    """

    ranks: Ranks
    device: torch.device
    scaler: torch.amp.GradScaler | None
    frontload: bool
    withhold_zeros: bool
    treatment: Treatment
    residuals: Residuals
    step: Transaction | None = None
    tally: Tally = field(default_factory=Tally)
    ahead: Ahead | None = None
    closed: bool = False
    undo: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Exchange nothing more, and undo what the driver has done."""
        self.closed = True
        try:
            self.undo.close()
        finally:
            self.ranks.close()
