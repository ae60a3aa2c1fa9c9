"""Parameters of the model whose gradients nobody averages, because they came too late."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch.optim import Optimizer

from sparcel.errors import InputError


class Unaveraged:
    """Refuses a step of an optimiser that would let ranks drift apart.

    What averages gradients looks at a model once. It says nothing of a parameter that is added to
    the model later.

    Parameters
    ----------
    averaged
        Returns the ids of the parameters that are averaged, or were there to be.
    find
        Returns the names of the model's parameters by their id, without those that are the user's
        business. It goes through the whole model, so it is called only when an optimiser updates
        something else than ``averaged``.
    said
        Returns what to say of a parameter and the kind of optimiser that updates it.
    """

    def __init__(
        self,
        averaged: Callable[[], Collection[int]],
        find: Callable[[], Mapping[int, str]],
        said: Callable[[str, str], str],
    ) -> None:
        self._averaged, self._find, self._said = averaged, find, said

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise `InputError` if the optimiser is about to update such a parameter."""
        averaged = self._averaged()
        others = [
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in averaged
            and parameter.requires_grad
            and parameter.grad is not None
        ]
        names = self._find() if others else {}
        for one in others:
            if one in names:
                raise InputError(self._said(names[one], type(optimizer).__name__))
