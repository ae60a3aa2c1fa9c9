"""Parameters of the model whose gradients nobody averages, because it was wrapped without them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparcel.errors import InputError
from sparcel.training.names import model_name


class Unaveraged:
    """Refuses a step of an optimiser that would let ranks drift apart.

    DDP averages the parameters that were trained when it wrapped the model. It says nothing of one
    that is unfrozen, replaced or added later.

    Parameters
    ----------
    model
        The model.
    averaged
        The parameters that are averaged, by name.
    """

    def __init__(self, model: DistributedDataParallel, averaged: Mapping[str, Tensor]) -> None:
        self._model = weakref.ref(model)
        self._averaged = averaged
        self._seen: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        """The ids of each optimiser's parameters when the model was last looked at."""
        self._names: dict[int, str] = {}
        """The names of parameters that nobody averages, by their id."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise `InputError` if the optimiser is about to update such a parameter."""
        model = self._model()
        if model is None:
            return
        updated = [one for group in optimizer.param_groups for one in group["params"]]
        ids = {id(parameter) for parameter in updated}
        if self._seen.get(optimizer) != ids:
            self._seen[optimizer] = ids
            self._names = self._look(model)
        for parameter in updated:
            name = self._names.get(id(parameter))
            if name is not None and parameter.requires_grad and parameter.grad is not None:
                raise InputError(
                    f"{name!r} was frozen when the model was wrapped, or was no part of it, and now"
                    f" {type(optimizer).__name__} updates it with a gradient that nobody averages;"
                    " close() the handle, wrap the module in a new DistributedDataParallel, attach"
                    " again, and load the old handle's state_dict(), with strict=False"
                )

    def _look(self, model: DistributedDataParallel) -> dict[int, str]:
        averaged = {id(parameter) for parameter in self._averaged.values()}
        return {
            id(parameter): model_name(name)
            for name, parameter in model.module.named_parameters()
            if id(parameter) not in averaged and name not in model.parameters_to_ignore
        }
