"""Parameters of the model whose gradients nobody averages, because it was attached without them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from sparcel.fsdp.groups import Group
from sparcel.training.names import model_name
from sparcel.training.unaveraged import Unaveraged


def unaveraged(model: nn.Module, groups: Sequence[Group]) -> Unaveraged:
    """Return what refuses to update parameters that became a part of the model after `attach`.

    Those that FSDP was told to ignore (``ignored_params``) are the user's business.
    """
    held, ignored = weakref.ref(model), set(_unknown(model, groups).values())

    def find() -> dict[int, str]:
        model = held()
        found = {} if model is None else _unknown(model, groups)
        return {key: name for key, name in found.items() if name not in ignored}

    return Unaveraged(lambda: _known(groups), find, _said)


def _known(groups: Sequence[Group]) -> set[int]:
    return {id(one.parameter) for group in groups for one in (*group.held, *group.frozen)}


def _unknown(model: nn.Module, groups: Sequence[Group]) -> dict[int, str]:
    """Return the names of the parameters that are in none of the groups, by their id."""
    known = _known(groups)
    return {
        id(parameter): model_name(name)
        for name, parameter in model.named_parameters()
        if id(parameter) not in known
    }


def _said(name: str, optimizer: str) -> str:
    return (
        f"{name!r} was no part of the model when it was attached, and now {optimizer} updates it"
        " with a gradient that nobody averages; apply fully_shard to it, close() the handle, attach"
        " again, and load the old handle's state_dict(), with strict=False"
    )
