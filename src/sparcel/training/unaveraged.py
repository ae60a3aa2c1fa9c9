"""Parameters of the model whose gradients nobody averages, because they came too late."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection

from torch import nn
from torch.optim import Optimizer

from sparcel.errors import InputError
from sparcel.training.names import model_name


class Unaveraged:
    """Refuses a step of an optimiser that would let ranks drift apart.

    What averages gradients looks at a model once. It says nothing of a parameter that is added to
    the model later.

    Parameters
    ----------
    model
        The model, which is not kept alive.
    averaged
        Returns the ids of the parameters that are averaged, or were there to be.
    ignored
        The names in the model of the parameters that are the user's business.
    why, way_out
        Why nobody averages a parameter, and what to do before its memory is loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        averaged: Callable[[], Collection[int]],
        ignored: Collection[str],
        why: str,
        way_out: str,
    ) -> None:
        self._model = weakref.ref(model)
        self._averaged, self._ignored = averaged, ignored
        self._why, self._way_out = why, way_out

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise `InputError` if the optimiser is about to update such a parameter."""
        averaged, model = self._averaged(), self._model()
        others = {
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in averaged
            and parameter.requires_grad
            and parameter.grad is not None
        }
        if not others or model is None:
            return
        for key, parameter in model.named_parameters():
            if id(parameter) in others and (name := model_name(key)) not in self._ignored:
                raise InputError(
                    f"{name!r} {self._why}, and now {type(optimizer).__name__} updates it with a"
                    f" gradient that nobody averages; {self._way_out}, and load the old handle's"
                    " state_dict(), with strict=False"
                )
