"""What a checkpoint holds of the memory, and which rank of another number of ranks loads it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from sparcel.comm import Communicator
from sparcel.errors import InputError, warn
from sparcel.training.layout import Layout, Place, fits
from sparcel.training.residuals import Residuals

_COMMON = ("steps", "world_size", "filter")
_LAYOUT = "layout."
"""These entries are the same on all ranks."""

_ENTRY = re.compile(r"(rank|velocity)(\d+)\.(.+)", re.DOTALL)
"""Each rank has its own keys, because checkpoints keep only one rank's tensor under each key."""

_PREFIXES = {"memory": "rank", "velocity": "velocity"}
_KINDS = {prefix: kind for kind, prefix in _PREFIXES.items()}

_NAMED_FAULTS = 3
"""How many faults of a state a warning names."""


def collect(
    residuals: Residuals, remembered: Mapping[str, Tensor], rank: int, ranks: int, saved_by: int
) -> dict[str, Tensor]:
    """Return copies of what this rank remembers, with room for what it inherits."""
    state = _common(residuals, remembered, saved_by)
    for old_rank in _inherited(rank, ranks, saved_by):
        for name, tensor in remembered.items():
            dtype = residuals.dtype_of(tensor)
            parts = residuals.of(name) if old_rank == rank else {}
            for kind in residuals.kinds:
                part = parts.get(kind)
                owed = _zeros(tensor, dtype) if part is None else part.clone()
                state[_key(kind, old_rank, name)] = owed
    return state


def gather(
    residuals: Residuals, remembered: Mapping[str, Tensor], comm: Communicator
) -> dict[str, Tensor]:
    """Return what all ranks remember on rank 0, on the CPU, and nothing elsewhere.

    All ranks call, inside a job. Ranks send a copy of one tensor at a time, and what arrives
    becomes part of the result.
    """
    state = _common(residuals, remembered, comm.size) if comm.rank == 0 else {}
    others = range(1, comm.size) if comm.rank == 0 else ()
    for name, tensor in remembered.items():
        dtype = residuals.dtype_of(tensor)
        for kind in residuals.kinds:
            part = residuals.of(name).get(kind, tensor.new_empty(0, dtype=dtype))
            own = part.clone()  # nothing stands for zeros
            sends = {} if comm.rank == 0 else {0: own.view(torch.uint8)}
            at_most = tensor.numel() * own.element_size()
            arrived = comm.exchange(sends, dict.fromkeys(others, at_most))
            if comm.rank == 0:
                parts = [own, *(arrived[rank].view(own.dtype) for rank in others)]
                for rank, whole in enumerate(parts):
                    found = whole if whole.numel() else _zeros(tensor, dtype)
                    state[_key(kind, rank, name)] = found.cpu()
    return state


def load(
    state: Mapping[str, Tensor],
    residuals: Residuals,
    remembered: Mapping[str, Tensor],
    rank: int,
    ranks: int,
    strict: bool,
) -> None:
    """Let the residuals go on from a state: sums over the inherited ranks, by name."""
    inherited = _inherited(rank, ranks, int(state.get("world_size", ranks)))
    faults = [
        f"the state has no {key!r}; give what state_dict() or full_state_dict() returned"
        for key in ("steps", "world_size")
        if key not in state
    ]
    loaded: dict[str, dict[str, Tensor]] = {}
    found: set[tuple[int, str]] = set()
    for key, part in state.items():
        if key in _COMMON or key.startswith(_LAYOUT):
            continue
        if fault := _fault(key, part, remembered):
            faults.append(fault)
        else:
            kind, old_rank, name = _parsed(key)
            if old_rank in inherited:
                if kind == "memory":
                    found.add((old_rank, name))
                like = remembered[name]
                part = part.detach().to(like.device, residuals.dtype_of(like))
                parts = loaded.setdefault(name, {})
                parts[kind] = parts[kind] + part if kind in parts else part.clone()
    loaded = {name: parts for name, parts in loaded.items() if "memory" in parts}
    faults += _missing(inherited, found, remembered, rank, ranks)
    if faults and strict:
        raise InputError(faults[0])
    if faults:
        more = f"; and {len(faults) - _NAMED_FAULTS} more" if len(faults) > _NAMED_FAULTS else ""
        warn(
            f"the memory of {len(remembered) - len(loaded)} of {len(remembered)} tensors starts"
            f" empty on rank {rank}, or without a part: {'; '.join(faults[:_NAMED_FAULTS])}{more}"
        )
    beta = float(state["filter"]) if "filter" in state else None
    residuals.load(loaded, int(state.get("steps", 0)), beta, _layout(state, remembered))


def _common(
    residuals: Residuals, remembered: Mapping[str, Tensor], saved_by: int
) -> dict[str, Tensor]:
    """Return the entries that are the same on all ranks."""
    state = {"steps": torch.tensor(residuals.steps), "world_size": torch.tensor(saved_by)}
    if remembered:
        state["filter"] = torch.tensor(residuals.filter, dtype=torch.float64)
    layout = residuals.layout()
    for name in remembered:
        state[_LAYOUT + name] = torch.tensor(layout.get(name, Place(-1, 0, 0)))
    return state


def _layout(state: Mapping[str, Tensor], remembered: Mapping[str, Tensor]) -> Layout:
    """Return the layout that a state holds; empty if the tensors of now do not fit in it.

    This depends only on entries that are the same on all ranks, because ranks must not differ.
    """
    places = {
        name: Place(*state[_LAYOUT + name].tolist())
        for name in remembered
        if _LAYOUT + name in state
    }
    layout = {name: place for name, place in places.items() if place.vector >= 0}
    return layout if fits(layout, remembered) else {}


def _inherited(rank: int, ranks: int, saved_by: int) -> range:
    """Return the old ranks whose residuals become this rank's."""
    return range(rank, saved_by, ranks)


def _key(kind: str, rank: int, name: str) -> str:
    return f"{_PREFIXES[kind]}{rank}.{name}"


def _parsed(key: str) -> tuple[str, int, str]:
    """Return the kind, the rank and the tensor's name of an entry."""
    entry = _ENTRY.fullmatch(key)
    assert entry is not None, "_fault refuses other keys"
    return _KINDS[entry[1]], int(entry[2]), entry[3]


def _zeros(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a rank remembers of a tensor before its first step."""
    return torch.zeros_like(tensor, dtype=dtype).flatten()


def _fault(key: str, part: Tensor, remembered: Mapping[str, Tensor]) -> str:
    """Say why an entry does not fit; an empty string if it does."""
    if _ENTRY.fullmatch(key) is None:
        return (
            f"{key!r} is no entry of such a state, whose entries are named like 'rank0.weight';"
            " give what state_dict() or full_state_dict() returned"
        )
    _, _, name = _parsed(key)
    if name not in remembered:
        return (
            f"{key!r} fits no tensor that is made sparse; use the scheme and the"
            " policy that the state was saved with"
        )
    if part.numel() != remembered[name].numel():
        return (
            f"{key!r} has {part.numel()} elements, the parameter {remembered[name].numel()}; load"
            " the state for the tensors that it was saved from"
        )
    return ""


def _missing(
    inherited: range,
    found: set[tuple[int, str]],
    remembered: Mapping[str, Tensor],
    rank: int,
    ranks: int,
) -> list[str]:
    """Say what this rank takes over and the state does not hold."""
    nothing = [old for old in inherited if not any((old, name) in found for name in remembered)]
    if nothing and remembered:
        return [
            f"the state holds nothing of the old ranks {nothing}, which rank {rank} of now {ranks}"
            " takes over; save full_state_dict(), or load with state_dict(saved_by=…), or give"
            " rank r what ranks r, r+P, … saved"
        ]
    names = [name for name in remembered if any((old, name) not in found for old in inherited)]
    return [f"the state holds no memory of {names}"] if names else []
