"""Parameters of the model whose gradients nobody averages, because they came too late."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

from torch.optim import Optimizer

from sparcel.errors import InputError


class Unaveraged:
    """Refuses a step of an optimiser that would let ranks drift apart.

    What averages gradients looks at a model once. It says nothing of a parameter that is added to
    the model later.

    Parameters
    ----------
    find
        Returns the names of the parameters that nobody averages, by their id.
    said
        Returns what to say of a parameter and the kind of optimiser that updates it.
    """

    def __init__(
        self, find: Callable[[], Mapping[int, str]], said: Callable[[str, str], str]
    ) -> None:
        self._find, self._said = find, said
        self._seen: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        """The ids of each optimiser's parameters when the model was last looked at."""
        self._names: Mapping[int, str] = {}
        """The names of parameters that nobody averages, by their id."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise `InputError` if the optimiser is about to update such a parameter."""
        updated = [one for group in optimizer.param_groups for one in group["params"]]
        ids = {id(parameter) for parameter in updated}
        if self._seen.get(optimizer) != ids:
            self._seen[optimizer] = ids
            self._names = self._find()
        for parameter in updated:
            name = self._names.get(id(parameter))
            if name is not None and parameter.requires_grad and parameter.grad is not None:
                raise InputError(self._said(name, type(optimizer).__name__))
