"""Whether a state can be that of an optimiser, before anything of it is taken over."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from sparcel._checks import all_finite, check_type, checked_number, checked_whole
from sparcel.errors import InputError


class ChecksStates(torch.optim.Optimizer, ABC):
    """An optimiser that checks a state before it takes over anything of it."""

    _TOGETHER: Collection[str] = ()
    """The entries of a parameter's state that it has all of, or none."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, for the same parameters in the same order.

        torch's states tell parameters by their places. Those of another order are found if shapes
        differ, or if the parameters were given with names, ``model.named_parameters()``.

        Raises
        ------
        InputError
            For the state of another kind of optimiser or of other parameters, and for values that
            no state has; nothing changes then.
        """
        hint = f"load what state_dict() of a {type(self).__name__} returned"
        check_type(state_dict, dict, "state_dict", hint)
        # Hooks of others come first: they may change what is loaded.
        hook = self.register_load_state_dict_pre_hook(
            ChecksStates._check_state  # type: ignore[arg-type]
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    @abstractmethod
    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise `InputError` if a setting of a group is wrong."""

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raise `InputError` unless this optimiser can go on from a state."""
        kind = type(self).__name__
        hint = f"load what state_dict() of a {kind} with the same parameters returned"
        for key, expected in (("state", dict), ("param_groups", list)):
            check_type(state.get(key), expected, f"the state's {key!r}", hint)
        groups, own_groups = state["param_groups"], self.param_groups
        for group in groups:
            check_type(group, dict, "each of the state's groups", hint)
            if missing := self.defaults.keys() - group.keys():
                raise InputError(
                    f"this is not the state of a {kind}: its groups have no"
                    f" {', '.join(sorted(missing))}"
                )
            self._check_group(group)
            check_type(group.get("params"), list, "what a group of the state calls 'params'", hint)
        sizes = [len(group["params"]) for group in groups]
        own_sizes = [len(group["params"]) for group in own_groups]
        if sizes != own_sizes:
            raise InputError(
                f"the state must have groups of {own_sizes} parameters, got {sizes}; {hint}"
            )
        for group, own in zip(groups, own_groups, strict=True):
            _check_names(group.get("param_names"), own.get("param_names"))
            for place, parameter in zip(group["params"], own["params"], strict=True):
                entries = state["state"].get(place, {})
                name = f"the state's entry {place!r}"
                check_type(entries, dict, name, hint)
                if entries and (missing := set(self._TOGETHER) - entries.keys()):
                    raise InputError(f"{name} must have {sorted(missing)}; {hint}")
                for key, value in entries.items():
                    _check_entry(key, value, parameter, f"{key!r} in {name}", hint)


def _check_names(saved: object, own: list[str] | None) -> None:
    """Raise `InputError` if both groups name their parameters, and not alike."""
    if saved is None or own is None or saved == own:
        return
    check_type(saved, list, "the state's 'param_names'", "leave them out, or give all of them")
    assert isinstance(saved, list)
    one, two = next(pair for pair in zip_longest(saved, own) if pair[0] != pair[1])
    raise InputError(
        f"the state was saved for other parameters, or for the same in another order: it has"
        f" {one!r} where the optimiser has {two!r}; make the optimiser with its parameters in the"
        " saved order"
    )


def _check_entry(key: str, value: object, parameter: Tensor, name: str, hint: str) -> None:
    """Raise `InputError` unless an entry of a parameter can be what its name says."""
    if key == "step":
        checked_whole(value, name, at_least=1, hint=hint)
    elif key == "trust_ratio":
        checked_number(value, name, at_least=0, below=math.inf, hint=hint)
    elif key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        check_type(value, Tensor, name, hint)
        assert isinstance(value, Tensor)
        if value.shape != parameter.shape or not value.is_floating_point() or value.is_meta:
            raise InputError(
                f"{name} must hold floats of shape {tuple(parameter.shape)}, got {value.dtype} of"
                f" shape {tuple(value.shape)} on {value.device}; {hint}"
            )
        if not all_finite(value):
            raise InputError(
                f"{name} must be finite, got NaN or Inf, which would enter the parameters; load a"
                " state that was saved before"
            )
