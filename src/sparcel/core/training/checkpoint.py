"""What a checkpoint holds of the memory, whether a state can be one, and who loads what of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparcel.core._checks import check_part, check_type, checked_filter, checked_whole
from sparcel.core.comm import Communicator
from sparcel.core.device import read
from sparcel.core.training.layout import Layout, Position, fits
from sparcel.core.training.ranks import Shard
from sparcel.core.training.residuals import FLUSH_STEPS
from sparcel.core.training.transaction import Session
from sparcel.errors import InputError, warn

_COMMON = ("steps", "world_size", "filter", "flush")
_LAYOUT = "layout."
"""These entries are the same on all ranks, of which checkpoints may keep any one's."""

_ENTRY = re.compile(r"(rank|velocity)(0|[1-9][0-9]{0,8})\.(.+)", re.DOTALL)
"""Each rank has its own keys, because checkpoints keep only one rank's tensor under each key."""

_PREFIXES = {"memory": "rank", "velocity": "velocity"}
_KINDS = {prefix: kind for kind, prefix in _PREFIXES.items()}

_MOST = 2**53
"""More steps, or ranks, than there will be."""

_WAY_OUT = "give what state_dict() or full_state_dict() returned"

_SUMS_OF_VELOCITIES = (
    "the state has velocities: its memory is a sum of velocities, and a scheme without memory can"
    " flush gradients alone; load it for a scheme with the same momentum"
)

_NAMED_FAULTS = 3
"""How many faults of a state a warning names."""


def collect(session: Session, saved_by: int | None) -> dict[str, Tensor]:
    """Return copies of what this rank remembers, with room for what it inherits.

    The keys depend on nothing but the ranks' numbers: a rank that owes nothing has zeros.
    """
    residuals, comm, shard = session.residuals, session.ranks.comm, session.ranks.shard
    saved_by = comm.size if saved_by is None else checked_whole(saved_by, "saved_by", at_least=1)
    kinds, rank, state = residuals.owed_kinds, comm.rank, _common(session, saved_by)
    for old_rank in range(rank, saved_by, comm.size):
        for name, tensor in session.treatment.eligible.items():
            dtype = residuals.dtype_of(tensor)
            parts = residuals.of(name) if old_rank == rank else {}
            for kind in kinds:
                part = parts.get(kind)
                owed = _zeros(tensor, dtype) if part is None else part.clone()
                if shard is not None:
                    owed = shard.distributed(name, owed)
                state[_key_of(kind, old_rank, name)] = owed
    return state


def gather(session: Session) -> dict[str, Tensor]:
    """Return what all ranks remember on rank 0, on the CPU, and nothing elsewhere.

    All ranks call, inside a job. Ranks send a copy of one tensor at a time, and what arrives
    becomes part of the result.
    """
    residuals, comm = session.residuals, session.ranks.comm
    state = _common(session, comm.size) if comm.rank == 0 else {}
    others = range(1, comm.size) if comm.rank == 0 else ()
    for name, tensor in session.treatment.eligible.items():
        dtype = residuals.dtype_of(tensor)
        for kind in residuals.owed_kinds:
            part = residuals.of(name).get(kind, tensor.new_empty(0, dtype=dtype))
            own = part.clone()  # nothing stands for zeros
            sends = {} if comm.rank == 0 else {0: own.view(torch.uint8)}
            at_most = tensor.numel() * own.element_size()
            arrived = comm.exchange(sends, dict.fromkeys(others, at_most))
            if comm.rank == 0:
                parts = [own, *(arrived[rank].view(own.dtype) for rank in others)]
                for rank, owed in enumerate(parts):
                    found = owed if owed.numel() else _zeros(tensor, dtype)
                    state[_key_of(kind, rank, name)] = found.cpu()
    return state


def load(state: Mapping[str, Tensor], session: Session, strict: bool) -> None:
    """Let the residuals go on from a state: sums over the inherited ranks, by name.

    What is owed is the average of the ranks' memory, so that is what stays. The state may be that
    of another scheme. A scheme without memory flushes what it owes. All is checked first, and
    nothing changes if it is refused.
    """
    residuals, tensors, ranks = session.residuals, session.treatment.eligible, session.ranks
    rank, size = ranks.comm.rank, ranks.comm.size
    saved = _checked(state, tensors, size, ranks.shard)
    inherited, faults = range(rank, saved.ranks, size), saved.faults
    entries = [entry for entry in saved.entries if entry.rank in inherited]
    found = {(entry.rank, entry.name) for entry in entries if entry.kind == "memory"}
    owing = {name for _, name in found}
    share = size / saved.ranks  # updates are averages, over more or fewer ranks than before
    factors = {"memory": share / saved.filter, "velocity": share}
    entries = [entry for entry in entries if entry.name in owing]
    loaded = _sums(entries, session, factors)
    if not residuals.kinds and any("velocity" in parts for parts in loaded.values()):
        faults.append(_SUMS_OF_VELOCITIES)
        loaded = {}
    flush = saved.flush
    if flush is None:
        # Not of what this rank takes over alone: others may owe something, and all must know.
        flush = FLUSH_STEPS if residuals.kinds or saved.entries else 0
    if flush:  # otherwise nothing was owed
        faults += _missing(inherited, found, tensors, ranks.comm)
    if faults and strict:
        raise InputError(faults[0])
    if faults:
        more = f"; and {len(faults) - _NAMED_FAULTS} more" if len(faults) > _NAMED_FAULTS else ""
        warn(
            f"the memory of {len(tensors) - len(loaded)} of {len(tensors)} tensors starts"
            f" empty on rank {rank}, or without a part: {'; '.join(faults[:_NAMED_FAULTS])}{more}"
        )
    residuals.load(loaded, saved.steps, saved.layout, flush)


def _sums(
    entries: Sequence[_Entry], session: Session, factors: Mapping[str, float]
) -> dict[str, dict[str, Tensor]]:
    """Return by name what this rank takes over: sums, times a factor, in the dtype of its memory.

    All are finite, also when all ranks add them up with velocities and gradients like them.
    """
    ranks = session.ranks.comm.size
    sums: dict[str, dict[str, Tensor]] = {}
    for kind, _, name, part, _ in entries:
        like, parts = session.treatment.tensors[name], sums.setdefault(name, {})
        part = part.to(like.device, session.residuals.dtype_of(like), copy=kind not in parts)
        parts[kind] = parts[kind].add_(part) if kind in parts else part
    for name, parts in sums.items():
        for kind, total in parts.items():
            if factors[kind] != 1:
                total.mul_(factors[kind])
            norm = torch.linalg.vector_norm
            largest = float(read(norm(total, torch.inf))) if total.numel() else 0.0
            at_most = torch.finfo(total.dtype).max / (4 * ranks)
            if not largest <= at_most:
                keys = [repr(one.key) for one in entries if (one.name, one.kind) == (name, kind)]
                raise InputError(
                    f"the state's {' + '.join(keys)} must be finite, and at most {at_most:.2g} so"
                    f" that sums over {ranks} ranks are, got {largest:.2g}, which would stay in the"
                    " memory; load a state that was saved before"
                )
    return sums


def _common(session: Session, saved_by: int) -> dict[str, Tensor]:
    """Return the entries that are the same on all ranks: not the places of shards in vectors.

    ``flush`` says in how many steps a scheme without memory would flush what the state owes; 0 says
    that no rank owes anything.
    """
    residuals = session.residuals
    owes, placed = bool(residuals.owed_kinds), session.ranks.shard is None
    state = {
        "steps": torch.tensor(residuals.steps),
        "world_size": torch.tensor(saved_by),
        "flush": torch.tensor(residuals.flush.steps if owes else 0),
    }
    if owes:  # in 0.1.0 ScaleCom's β, 1 since; distributed checkpoints load what is asked for alone
        state["filter"] = torch.tensor(1.0, dtype=torch.float64)
    layout = residuals.layout() if residuals.kinds else {}
    for name in session.treatment.eligible if owes and placed else ():
        state[_LAYOUT + name] = torch.tensor(layout.get(name, Position(-1, 0, 0)))
    return state


def _zeros(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a rank remembers of a tensor before its first step."""
    return torch.zeros_like(tensor, dtype=dtype).flatten()


def _missing(
    inherited: range, found: set[tuple[int, str]], tensors: Mapping[str, Tensor], comm: Communicator
) -> list[str]:
    """Say what this rank takes over and the state does not hold."""
    present = {old for old, _ in found}
    nothing = list(islice((old for old in inherited if old not in present), _NAMED_FAULTS))
    if nothing and tensors:
        more = ", …" if len(inherited) - len(present) > len(nothing) else ""
        return [
            f"the state holds nothing of the old ranks [{', '.join(map(str, nothing))}{more}],"
            f" which rank {comm.rank} of now {comm.size}"
            " takes over; let torch.distributed.checkpoint load into state_dict(saved_by=…), or"
            " save full_state_dict(), or give rank r what ranks r, r+P, … saved"
        ]
    names = [name for name in tensors if any((old, name) not in found for old in inherited)]
    if not names:
        return []
    way_out = "use the model and the policy that it was saved with"
    return [f"the state holds no memory of {names}; {way_out}"]


class _Entry(NamedTuple):
    """What one of the old ranks remembered of a tensor."""

    kind: str
    rank: int
    name: str
    part: Tensor
    key: str


@dataclass(frozen=True)
class _Saved:
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
    entries: list[_Entry]
    faults: list[str]


def _checked(
    state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], ranks: int, shard: Shard | None
) -> _Saved:
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
    beta = checked_filter(state.get("filter", 1.0), "the state's 'filter'", _WAY_OUT)
    flush = _checked_count(state, "flush", 0, FLUSH_STEPS)
    layout = _checked_layout(state, tensors)
    entries = []
    for key, part in state.items():
        if key in _COMMON or (isinstance(key, str) and key.startswith(_LAYOUT)):
            continue
        found = _checked_entry(key, part, tensors, saved_by, shard)
        if isinstance(found, _Entry):
            entries.append(found)
        else:
            faults.append(found)
    if flush == 0 and entries:
        raise InputError(
            f"the state's 'flush' must be at least 1, got 0, which says that no rank owes anything,"
            f" but there is {entries[0].key!r}; {_WAY_OUT}"
        )
    return _Saved(steps, saved_by, beta, flush, layout, entries, faults)


def _key_of(kind: str, rank: int, name: str) -> str:
    """Return what an entry is called."""
    return f"{_PREFIXES[kind]}{rank}.{name}"


def _checked_count(state: Mapping[str, Any], key: str, at_least: int, at_most: int) -> int | None:
    """Return a whole number of the state; None if it is not there."""
    if key not in state:
        return None
    return checked_whole(state[key], f"the state's {key!r}", at_least, at_most, _WAY_OUT)


def _checked_layout(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout that a state holds; empty if the tensors of now do not fit in it.

    This depends only on entries that are the same on all ranks, because ranks must not differ.
    """
    keys = {name: _LAYOUT + name for name in tensors if _LAYOUT + name in state}
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
    key: str,
    part: object,
    tensors: Mapping[str, Tensor],
    saved_by: int,
    shard: Shard | None,
) -> _Entry | str:
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
    return _Entry(kind, rank, name, part.detach(), key)
