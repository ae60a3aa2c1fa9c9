"""What a checkpoint holds of the memory, and which rank of another number of ranks loads it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from sparcel.errors import InputError
from sparcel.memory import wide_dtype
from sparcel.training.residuals import Residuals

_ENTRY = re.compile(r"(rank|velocity)(\d+)\.(.+)", re.DOTALL)
"""Each rank has its own keys, because checkpoints keep only one rank's tensor under each key."""

_PREFIXES = {"memory": "rank", "velocity": "velocity"}
_KINDS = {prefix: kind for kind, prefix in _PREFIXES.items()}


def collect(
    residuals: Residuals, remembered: Mapping[str, Tensor], rank: int, ranks: int, saved_by: int
) -> dict[str, Tensor]:
    """Return copies of what this rank remembers, with room for what it inherits."""
    state = {
        "steps": torch.tensor(residuals.steps),
        "world_size": torch.tensor(saved_by),
    }
    if remembered:
        state["filter"] = torch.tensor(residuals.filter, dtype=torch.float64)
    for old_rank in _inherited(rank, ranks, saved_by):
        for name, tensor in remembered.items():
            parts = residuals.of(name) if old_rank == rank else {}
            for kind in residuals.kinds:
                part = parts.get(kind)
                state[f"{_PREFIXES[kind]}{old_rank}.{name}"] = (
                    torch.zeros_like(tensor, dtype=wide_dtype(tensor.dtype)).flatten()
                    if part is None
                    else part.clone()
                )
    return state


def take_over(
    state: Mapping[str, Tensor], remembered: Mapping[str, Tensor], rank: int, ranks: int
) -> dict[str, dict[str, Tensor]]:
    """Return the residuals that this rank goes on from, by name: sums over inherited ranks."""
    for key in ("steps", "world_size"):
        if key not in state:
            raise InputError(f"the state has no {key!r}; give what state_dict() returned")
    inherited = _inherited(rank, ranks, int(state["world_size"]))
    residuals: dict[str, dict[str, Tensor]] = {}
    found: set[int] = set()
    for key, part in state.items():
        if key in ("steps", "world_size", "filter"):
            continue
        kind, old_rank, name = _checked(key, part, remembered)
        if old_rank in inherited:
            found.add(old_rank)
            part = part.detach().to(remembered[name].device, wide_dtype(remembered[name].dtype))
            parts = residuals.setdefault(name, {})
            parts[kind] = parts[kind] + part if kind in parts else part.clone()
    missing = [old_rank for old_rank in inherited if old_rank not in found]
    if missing and remembered:
        raise InputError(
            f"the state of {int(state['world_size'])} ranks holds nothing of ranks {missing},"
            f" which rank {rank} of now {ranks} takes over; load it with"
            " state_dict(saved_by=…), or give rank r what ranks r, r+P, … saved"
        )
    return residuals


def _inherited(rank: int, ranks: int, saved_by: int) -> range:
    """Return the old ranks whose residuals become this rank's."""
    return range(rank, saved_by, ranks)


def _checked(key: str, part: Tensor, remembered: Mapping[str, Tensor]) -> tuple[str, int, str]:
    """Return the kind, the rank and the tensor's name of an entry that fits."""
    entry = _ENTRY.fullmatch(key)
    if entry is None:
        raise InputError(
            f"{key!r} is no entry of such a state, whose entries are named like 'rank0.weight';"
            " give what state_dict() returned"
        )
    name = entry[3]
    if name not in remembered:
        raise InputError(
            f"{key!r} fits no tensor that is made sparse; use the scheme and the"
            " policy that the state was saved with"
        )
    if part.numel() != remembered[name].numel():
        raise InputError(
            f"{key!r} has {part.numel()} elements, the parameter {remembered[name].numel()}; load"
            " the state for the tensors that it was saved from"
        )
    return _KINDS[entry[1]], int(entry[2]), name
