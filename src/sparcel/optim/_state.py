"""Whether a state can be that of an optimiser, before anything of it is taken over."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from sparcel._checks import all_finite, check_type, number, whole_number
from sparcel.errors import InputError

Group = Mapping[str, Any]


@contextmanager
def checked(
    optimizer: torch.optim.Optimizer,
    state: object,
    check_group: Callable[[Group], None],
    together: Collection[str],
) -> Iterator[None]:
    """Check a state that is loaded in the block, after the hooks that may change it.

    ``check_group`` checks the settings of a group. ``together`` names what a parameter has all of
    or nothing.
    """
    hint = f"load what state_dict() of a {type(optimizer).__name__} returned"
    check_type(state, dict, "state_dict", hint)
    check = partial(_check_state, check_group=check_group, together=together)
    hook = optimizer.register_load_state_dict_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _check_state(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    check_group: Callable[[Group], None],
    together: Collection[str],
) -> None:
    """Raise `InputError` unless an optimiser can go on from a state."""
    kind = type(optimizer).__name__
    hint = f"load what state_dict() of a {kind} with the same parameters returned"
    for key, expected in (("state", dict), ("param_groups", list)):
        check_type(state.get(key), expected, f"the state's {key!r}", hint)
    groups, own_groups = state["param_groups"], optimizer.param_groups
    if len(groups) != len(own_groups):
        raise InputError(
            f"the state must have {len(own_groups)} groups of parameters, got {len(groups)}; {hint}"
        )
    for group, own in zip(groups, own_groups, strict=True):
        check_type(group, dict, "each of the state's groups", hint)
        if missing := optimizer.defaults.keys() - group.keys():
            raise InputError(
                f"this is not the state of a {kind}: its groups have no"
                f" {', '.join(sorted(missing))}"
            )
        check_group(group)
        numbers = group.get("params")
        check_type(numbers, list, "what a group of the state calls 'params'", hint)
        if len(numbers) != len(own["params"]):
            raise InputError(
                f"a group of the state must have {len(own['params'])} parameters, got"
                f" {len(numbers)}; {hint}"
            )
        _check_names(group.get("param_names"), own.get("param_names"))
        for place, parameter in zip(numbers, own["params"], strict=True):
            entries = state["state"].get(place, {})
            name = f"the state's entry {place!r}"
            check_type(entries, dict, name, hint)
            if entries and (missing := set(together) - entries.keys()):
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
        whole_number(value, name, at_least=1, hint=hint)
    elif key == "trust_ratio":
        number(value, name, at_least=0, below=math.inf, hint=hint)
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
