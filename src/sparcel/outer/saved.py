"""The state of outer steps: whether its entries fit, and how they are sharded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor

from sparcel._checks import check_type
from sparcel.errors import InputError
from sparcel.training import Shard

_WAY_OUT = "give what outer.state_dict() returned for the same model and method"

_AVERAGER = "averager."
"""What the names of an averager's entries begin with."""


def copied(tensors: Iterable[tuple[str, Tensor]], shard: Shard | None) -> dict[str, Tensor]:
    """Return copies of tensors such as ``shared.{name}``, sharded as the parameters are."""
    return {
        key: shard.distributed(name, one.clone().flatten())
        if shard is not None and (name := _name(key)) in shard.tensors
        else one.clone()
        for key, one in tensors
    }


def checked(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], shard: Shard | None
) -> dict[str, Tensor]:
    """Return what this rank has of the entries that are expected, in their shapes.

    Raises
    ------
    InputError
        When an entry is missing or does not fit.
    """
    check_type(state, Mapping, "state", _WAY_OUT)
    found: dict[str, Tensor] = {}
    for key, tensor in expected.items():
        if key not in state:
            raise InputError(f"the state has no {key!r}; {_WAY_OUT}")
        entry, name = state[key], _name(key)
        if shard is not None and name in shard.tensors:
            entry = cast("Tensor", shard.local(name, entry)).view(-1)
            tensor = tensor.view(-1)
        if entry.shape != tensor.shape:
            raise InputError(
                f"the state's {key!r} must have shape {list(tensor.shape)}, got"
                f" {list(entry.shape)}; {_WAY_OUT}"
            )
        found[key] = entry.view(expected[key].shape)
    return found


def entries_of(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of an averager's state."""
    return {f"{_AVERAGER}{name}": tensor for name, tensor in memory.items()}


def memory_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the averager's state whose entries `entries_of` has made."""
    return {
        name.removeprefix(_AVERAGER): tensor
        for name, tensor in state.items()
        if name.startswith(_AVERAGER)
    }


def of_rank(memory: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return an averager's state of one rank as that of another, of so many."""
    renamed = {
        re.sub(r"^(rank|velocity)\d+\.", rf"\g<1>{rank}.", name): tensor
        for name, tensor in memory.items()
    }
    return {**renamed, "world_size": torch.tensor(size)}


def _name(key: str) -> str:
    return key.partition(".")[2]
