"""What a checkpoint holds of the memory, and which rank of another number of ranks loads it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from sparcel.comm import Communicator
from sparcel.errors import InputError, warn
from sparcel.training.flush import FLUSH_STEPS
from sparcel.training.layout import Layout, Place, fits
from sparcel.training.residuals import Residuals

_COMMON = ("steps", "world_size", "filter", "flush")
_LAYOUT = "layout."
"""These entries are the same on all ranks, of which checkpoints may keep any one's."""

_ENTRY = re.compile(r"(rank|velocity)(\d+)\.(.+)", re.DOTALL)
"""Each rank has its own keys, because checkpoints keep only one rank's tensor under each key."""

_PREFIXES = {"memory": "rank", "velocity": "velocity"}
_KINDS = {prefix: kind for kind, prefix in _PREFIXES.items()}

_SUMS_OF_VELOCITIES = (
    "the state has velocities: its memory is a sum of velocities, and a scheme without memory can"
    " flush gradients alone; load it for a scheme with the same momentum"
)

_NAMED_FAULTS = 3
"""How many faults of a state a warning names."""


def collect(
    residuals: Residuals, tensors: Mapping[str, Tensor], rank: int, ranks: int, saved_by: int
) -> dict[str, Tensor]:
    """Return copies of what this rank remembers, with room for what it inherits.

    The keys depend on nothing but the ranks' numbers: a rank that owes nothing has zeros.
    ``tensors`` are those that schemes with memory make sparse, here and below.
    """
    kinds = residuals.owed_kinds
    state = _common(residuals, tensors, saved_by)
    for old_rank in _inherited(rank, ranks, saved_by):
        for name, tensor in tensors.items():
            dtype = residuals.dtype_of(tensor)
            parts = residuals.of(name) if old_rank == rank else {}
            for kind in kinds:
                part = parts.get(kind)
                owed = _zeros(tensor, dtype) if part is None else part.clone()
                state[_key(kind, old_rank, name)] = owed
    return state


def gather(
    residuals: Residuals, tensors: Mapping[str, Tensor], comm: Communicator
) -> dict[str, Tensor]:
    """Return what all ranks remember on rank 0, on the CPU, and nothing elsewhere.

    All ranks call, inside a job. Ranks send a copy of one tensor at a time, and what arrives
    becomes part of the result.
    """
    state = _common(residuals, tensors, comm.size) if comm.rank == 0 else {}
    others = range(1, comm.size) if comm.rank == 0 else ()
    for name, tensor in tensors.items():
        dtype = residuals.dtype_of(tensor)
        for kind in residuals.owed_kinds:
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
    tensors: Mapping[str, Tensor],
    rank: int,
    ranks: int,
    strict: bool,
) -> None:
    """Let the residuals go on from a state: sums over the inherited ranks, by name.

    The state may be that of another scheme. A scheme without memory flushes what it owes.
    """
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
        if fault := _fault(key, part, tensors):
            faults.append(fault)
        else:
            kind, old_rank, name = _parsed(key)
            if old_rank in inherited:
                if kind == "memory":
                    found.add((old_rank, name))
                like = tensors[name]
                part = part.detach().to(like.device, residuals.dtype_of(like))
                parts = loaded.setdefault(name, {})
                parts[kind] = parts[kind] + part if kind in parts else part.clone()
    loaded = {name: parts for name, parts in loaded.items() if "memory" in parts}
    if not residuals.kinds and any("velocity" in parts for parts in loaded.values()):
        faults.append(_SUMS_OF_VELOCITIES)
        loaded = {}
    flush_steps = int(state.get("flush", FLUSH_STEPS if residuals.kinds or loaded else 0))
    if flush_steps:  # otherwise nothing was owed
        faults += _missing(inherited, found, tensors, rank, ranks)
    if faults and strict:
        raise InputError(faults[0])
    if faults:
        more = f"; and {len(faults) - _NAMED_FAULTS} more" if len(faults) > _NAMED_FAULTS else ""
        warn(
            f"the memory of {len(tensors) - len(loaded)} of {len(tensors)} tensors starts"
            f" empty on rank {rank}, or without a part: {'; '.join(faults[:_NAMED_FAULTS])}{more}"
        )
    beta = float(state["filter"]) if "filter" in state else None
    steps, layout = int(state.get("steps", 0)), _layout(state, tensors)
    residuals.load(loaded, steps, beta, layout, flush_steps)


def _common(
    residuals: Residuals, tensors: Mapping[str, Tensor], saved_by: int
) -> dict[str, Tensor]:
    """Return the entries that are the same on all ranks.

    ``flush`` says in how many steps a scheme without memory would flush what the state owes; 0 says
    that no rank owes anything.
    """
    owes = bool(residuals.owed_kinds)
    state = {
        "steps": torch.tensor(residuals.steps),
        "world_size": torch.tensor(saved_by),
        "flush": torch.tensor(residuals.flush.steps if owes else 0),
    }
    if tensors and owes:
        state["filter"] = torch.tensor(residuals.filter, dtype=torch.float64)
    layout = residuals.layout() if residuals.kinds else {}
    for name in tensors if owes else ():
        state[_LAYOUT + name] = torch.tensor(layout.get(name, Place(-1, 0, 0)))
    return state


def _layout(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout that a state holds; empty if the tensors of now do not fit in it.

    This depends only on entries that are the same on all ranks, because ranks must not differ.
    """
    places = {
        name: Place(*state[_LAYOUT + name].tolist()) for name in tensors if _LAYOUT + name in state
    }
    layout = {name: place for name, place in places.items() if place.vector >= 0}
    return layout if fits(layout, tensors) else {}


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


def _fault(key: str, part: Tensor, tensors: Mapping[str, Tensor]) -> str:
    """Say why an entry does not fit; an empty string if it does."""
    if _ENTRY.fullmatch(key) is None:
        return (
            f"{key!r} is no entry of such a state, whose entries are named like 'rank0.weight';"
            " give what state_dict() or full_state_dict() returned"
        )
    _, _, name = _parsed(key)
    if name not in tensors:
        return (
            f"{key!r} fits no tensor that is made sparse; use the scheme and the"
            " policy that the state was saved with"
        )
    if part.numel() != tensors[name].numel():
        return (
            f"{key!r} has {part.numel()} elements, the parameter {tensors[name].numel()}; load"
            " the state for the tensors that it was saved from"
        )
    return ""


def _missing(
    inherited: range,
    found: set[tuple[int, str]],
    tensors: Mapping[str, Tensor],
    rank: int,
    ranks: int,
) -> list[str]:
    """Say what this rank takes over and the state does not hold."""
    nothing = [old for old in inherited if not any((old, name) in found for name in tensors)]
    if nothing and tensors:
        return [
            f"the state holds nothing of the old ranks {nothing}, which rank {rank} of now {ranks}"
            " takes over; save full_state_dict(), or load with state_dict(saved_by=…), or give"
            " rank r what ranks r, r+P, … saved"
        ]
    names = [name for name in tensors if any((old, name) not in found for old in inherited)]
    return [f"the state holds no memory of {names}"] if names else []
