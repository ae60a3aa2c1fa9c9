"""Parameters of the model whose gradients nobody averages, because it was wrapped without them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparcel.training.names import model_name
from sparcel.training.unaveraged import Unaveraged


def unaveraged(model: DistributedDataParallel, averaged: Mapping[str, Tensor]) -> Unaveraged:
    """Return what refuses to update parameters that are none of those that are averaged.

    DDP averages the parameters that were trained when it wrapped the model. It says nothing of one
    that is unfrozen, replaced or added later.
    """
    held, known = weakref.ref(model), {id(parameter) for parameter in averaged.values()}

    def find() -> dict[int, str]:
        model = held()
        if model is None:
            return {}
        return {
            id(parameter): model_name(name)
            for name, parameter in model.module.named_parameters()
            if name not in model.parameters_to_ignore
        }

    return Unaveraged(lambda: known, find, _said)


def _said(name: str, optimizer: str) -> str:
    return (
        f"{name!r} was frozen when the model was wrapped, or was no part of it, and now {optimizer}"
        " updates it with a gradient that nobody averages; close() the handle, wrap the module in a"
        " new DistributedDataParallel, attach again, and load the old handle's state_dict(), with"
        " strict=False"
    )
