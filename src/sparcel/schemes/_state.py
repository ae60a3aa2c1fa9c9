"""Whether a state can be that of a scheme, before anything of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparcel._checks import all_finite, check_part, checked_filter, checked_whole
from sparcel.errors import InputError
from sparcel.memory import saturate, wide_dtype

STATE_HINT = "give what state_dict() of such a scheme returned"
"""How an error about a state ends."""


def check_memory(state: Mapping[str, Any], scheme: str, remembers: Sequence[str]) -> None:
    """Raise `InputError` unless a scheme can go on from the steps, memory and velocity of a state.

    ``remembers`` are the names of what the scheme keeps.
    """
    checked_filter(state.get("beta", 1.0), "the state's 'beta'", STATE_HINT)
    for key in ("steps", "memory"):
        if key not in state:
            raise InputError(f"the state has no {key!r}; {STATE_HINT}")
    checked_whole(state["steps"], "the state's 'steps'", at_least=0, hint=STATE_HINT)
    sizes = {}
    for key in ("memory", "velocity"):
        if state.get(key) is not None:
            _check_part(state[key], f"the state's {key!r}")
            sizes[key] = state[key].numel()
    if sizes and not remembers:
        raise InputError(
            f"the state has a {next(iter(sizes))!r}, which {scheme} would drop; load it for a"
            " scheme with memory, or into an Averager, which pays what is owed"
        )
    if sizes.get("velocity", sizes.get("memory")) != sizes.get("memory"):
        raise InputError(
            f"the state's 'velocity' must be as long as its memory, got {sizes}; {STATE_HINT}"
        )


def owed_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state whose memory is what is owed; in 0.1.0 it was that times ScaleCom's β."""
    beta, memory = float(state.get("beta", 1.0)), state.get("memory")
    if memory is None or beta == 1:
        return state
    rest = {name: part for name, part in state.items() if name != "beta"}
    return {**rest, "memory": saturate(memory / beta)}


def _check_part(part: object, name: str) -> None:
    """Raise `InputError` unless ``part`` can be the memory or the velocity of a vector."""
    check_part(part, name, None, STATE_HINT)
    assert isinstance(part, Tensor)
    if part.dtype != wide_dtype(part.dtype):
        raise InputError(f"{name} must be float32 or float64, got {part.dtype}; {STATE_HINT}")
    if not all_finite(part):
        raise InputError(
            f"{name} must be finite, got NaN or Inf, which would stay in the memory; load a state"
            " that was saved before"
        )
