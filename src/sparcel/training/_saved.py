"""The entries of a checkpoint: what they are called, and whether they can be what was saved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparcel._checks import check_part, check_type, checked_filter, checked_whole
from sparcel.errors import InputError
from sparcel.training.flush import FLUSH_STEPS
from sparcel.training.layout import Layout, Position, fits
from sparcel.training.shard import Shard

COMMON = ("steps", "world_size", "filter", "flush")
LAYOUT = "layout."
"""These entries are the same on all ranks, of which checkpoints may keep any one's."""

_ENTRY = re.compile(r"(rank|velocity)(0|[1-9][0-9]{0,8})\.(.+)", re.DOTALL)
"""Each rank has its own keys, because checkpoints keep only one rank's tensor under each key."""

_PREFIXES = {"memory": "rank", "velocity": "velocity"}
_KINDS = {prefix: kind for kind, prefix in _PREFIXES.items()}

_MOST = 2**53
"""More steps, or ranks, than there will be."""

_WAY_OUT = "give what state_dict() or full_state_dict() returned"


class Entry(NamedTuple):
    """What one of the old ranks remembered of a tensor."""

    kind: str
    rank: int
    name: str
    part: Tensor

    @property
    def key(self) -> str:
        """What the entry is called."""
        return key_of(self.kind, self.rank, self.name)


@dataclass(frozen=True)
class Saved:
    """What a state says. All is checked but the values of the memory, which nobody has read yet.

    Attributes
    ----------
    faults
        What fits no tensor or is missing, in sentences.
    ranks
        How many saved it.
    filter
        The memory is what was owed times this: ScaleCom's β in 0.1.0, 1 since.
    flush
        None if the state does not say it.
    """

    steps: int
    ranks: int
    filter: float
    flush: int | None
    layout: Layout
    entries: list[Entry]
    faults: list[str]


def checked(
    state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], ranks: int, shard: Shard | None
) -> Saved:
    """Check a state that is loaded for some tensors on so many ranks, and return what it says.

    Raises
    ------
    InputError
        When an entry has a value that no state has.
    """
    check_type(state, Mapping, "state", _WAY_OUT)
    faults = [
        f"the state has no {key!r}; {_WAY_OUT}"
        for key in ("steps", "world_size")
        if key not in state
    ]
    steps = _checked_count(state, "steps", 0, _MOST) or 0
    saved_by = _checked_count(state, "world_size", 1, _MOST) or ranks
    beta, flush = _checked_filter(state), _checked_count(state, "flush", 0, FLUSH_STEPS)
    layout = _checked_layout(state, tensors)
    entries = []
    for key, part in state.items():
        if key in COMMON or (isinstance(key, str) and key.startswith(LAYOUT)):
            continue
        found = _checked_entry(key, part, tensors, saved_by, shard)
        if isinstance(found, Entry):
            entries.append(found)
        else:
            faults.append(found)
    if flush == 0 and entries:
        raise InputError(
            f"the state's 'flush' must be at least 1, got 0, which says that no rank owes anything,"
            f" but there is {entries[0].key!r}; {_WAY_OUT}"
        )
    return Saved(steps, saved_by, beta, flush, layout, entries, faults)


def key_of(kind: str, rank: int, name: str) -> str:
    """Return what an entry is called."""
    return f"{_PREFIXES[kind]}{rank}.{name}"


def _checked_count(state: Mapping[str, Any], key: str, at_least: int, at_most: int) -> int | None:
    """Return a whole number of the state; None if it is not there."""
    if key not in state:
        return None
    return checked_whole(state[key], f"the state's {key!r}", at_least, at_most, _WAY_OUT)


def _checked_filter(state: Mapping[str, Any]) -> float:
    """Return `Saved.filter`."""
    return checked_filter(state.get("filter", 1.0), "the state's 'filter'", _WAY_OUT)


def _checked_layout(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout that a state holds; empty if the tensors of now do not fit in it.

    This depends only on entries that are the same on all ranks, because ranks must not differ.
    """
    keys = {name: LAYOUT + name for name in tensors if LAYOUT + name in state}
    places = {name: _checked_place(key, state[key]) for name, key in keys.items()}
    # Vectors hold no tensors without elements, whatever an old state says.
    layout = {
        name: place for name, place in places.items() if place.vector >= 0 and tensors[name].numel()
    }
    return layout if fits(layout, tensors) else {}


def _checked_place(key: str, entry: object) -> Position:
    name = f"the state's {key!r}"
    check_type(entry, Tensor, name, _WAY_OUT)
    assert isinstance(entry, Tensor)
    if entry.dtype not in (torch.int32, torch.int64) or entry.shape != (3,) or entry.is_meta:
        raise InputError(
            f"{name} must be three whole numbers, got {entry.dtype} of shape {tuple(entry.shape)}"
            f" on {entry.device}; {_WAY_OUT}"
        )
    return Position(*entry.tolist())


def _checked_entry(
    key: object,
    part: object,
    tensors: Mapping[str, Tensor],
    saved_by: int,
    shard: Shard | None,
) -> Entry | str:
    """Return an entry of the memory, or say why it does not fit."""
    found = _ENTRY.fullmatch(key) if isinstance(key, str) else None
    if found is None:
        return (
            f"{key!r} is no entry of such a state, whose entries are named like 'rank0.weight';"
            f" {_WAY_OUT}"
        )
    kind, rank, name = _KINDS[found[1]], int(found[2]), found[3]
    if name not in tensors:
        return (
            f"{key!r} fits no tensor that is made sparse; use the scheme and the"
            " policy that the state was saved with"
        )
    if rank >= saved_by:
        return f"{key!r} is of a rank that a state of world size {saved_by} cannot have; {_WAY_OUT}"
    size = tensors[name].numel()
    if shard is not None:
        part = shard.local(name, part)
    if isinstance(part, Tensor) and part.numel() != size:
        return (
            f"{key!r} has {part.numel()} elements, the parameter {size}; load"
            " the state for the tensors that it was saved from"
        )
    check_part(part, f"the state's {key!r}", size, _WAY_OUT)
    assert isinstance(part, Tensor)
    return Entry(kind, rank, name, part.detach())
