"""What a publisher compares: what engines serve, and what it keeps of the last version."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.core._files import create, regular
from sparcel.errors import InputError, shown
from sparcel.products.delta.applying import write_in_turn
from sparcel.products.delta.chunk import Chunk
from sparcel.products.delta.elements import bits_of, layout_of
from sparcel.products.delta.parts import Part, local_of, owners, parts_of, untied

Cast: TypeAlias = Callable[[str, Tensor], Mapping[str, Tensor]]
"""Makes of a tensor and its name those that are served, by name: values and their scales."""

_ALIGNED = 64
"""Bytes: each tensor begins at a multiple of them."""

_RARE = 128
"""One in so many elements, those with the smallest magnitudes, is noted whole."""

_MOST = 16
"""If more than one in so many would be noted whole, as where many weights are zero, all are copied:
an element noted whole takes up to ten bytes more."""

_AT_ONCE = 1 << 20
"""Elements that are looked at together."""

_SAMPLE = 1 << 13


@torch.no_grad()
def served(tensors: Mapping[str, Tensor], cast: Cast | None) -> Mapping[str, Tensor]:
    """Return what a cast makes of each tensor; of tied ones it makes tied ones.

    Raises
    ------
    InputError
        If it makes no tensors by name, two of the same name, or of tied tensors different ones.
    """
    if cast is None:
        return tensors
    made: dict[str, Tensor] = {}
    of_owner: dict[str, list[Tensor]] = {}
    for name, owner in owners(parts_of(tensors)).items():
        told = cast(name, tensors[name].detach())
        if not isinstance(told, Mapping) or not all(isinstance(one, str) for one in told):
            raise InputError(
                f"a cast returns tensors by name, and returned for '{shown(name)}'"
                f" {shown(repr(told))}"
            )
        twice = [one for one in told if one in made]
        if twice:
            raise InputError(
                f"the cast of '{shown(name)}' makes '{shown(twice[0])}', which that of another"
                " tensor has made; name what it makes after the tensor"
            )
        first = of_owner.setdefault(owner, list(told.values()))
        if len(first) != len(told) or not all(map(_same, told.values(), first)):
            raise InputError(
                f"the cast of '{shown(name)}' makes other tensors than that of another one which is"
                " tied to it; let it depend on the values alone"
            )
        made |= dict(zip(told, first, strict=True))
    return made


def _same(tensor: Tensor, other: Tensor) -> bool:
    if tensor is other:
        return True
    a, b = local_of(tensor), local_of(other)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits_of(a), bits_of(b))


def copied(parts: Mapping[str, Part], file: Path | None = None) -> dict[str, Part]:
    """Copy what parts hold to the host; tied ones stay tied.

    Parameters
    ----------
    parts
        What to copy, on any device.
    file
        A file that is made anew, and then mapped; by default the copies are in memory.

    Raises
    ------
    FormatError
        If a link, a folder or the like is in the place of the file.
    OSError
        If the file cannot be made, or there is no room for it.
    """
    alone = untied(parts)
    size = sum(_padded(part.local.nbytes) for part in alone.values())
    if file is None or not size:
        room = torch.empty(size, dtype=torch.uint8)
    else:
        room = torch.frombuffer(_mapped(file, size), dtype=torch.uint8)
    copies, begin = {}, 0
    for name, part in alone.items():
        local = part.local
        copy = room[begin : begin + local.nbytes].view(local.dtype).view(local.shape)
        copies[name] = copy.copy_(local)
        begin += _padded(local.nbytes)
    return {name: Part(parts[name].piece, copies[own]) for name, own in owners(parts).items()}


def followed(
    base: Mapping[str, Part], now: Mapping[str, Part], chunks: Iterable[Chunk]
) -> dict[str, Part]:
    """Let a copy of a version follow by the chunks that make parts of it, and return it.

    Of the parts it copies those that are new, or cut otherwise. After an error the copy is torn.
    """
    write_in_turn(base, chunks)
    old, owner = untied(base), owners(now)
    first = {own: now[own] for own in owner.values()}
    kept = {
        name: old[name]
        for name, part in first.items()
        if name in old and old[name].piece == part.piece
    }
    kept |= copied({name: part for name, part in first.items() if name not in kept})
    return {name: Part(now[name].piece, kept[own].local) for name, own in owner.items()}


def _mapped(file: Path, size: int) -> mmap.mmap:
    """Make a file, map it, and reserve its blocks: a write to memory without blocks kills."""
    old = regular(file, links=False)
    file.unlink(missing_ok=True)
    with create(file, old) as made:
        try:
            os.posix_fallocate(made.fileno(), 0, size)
        except OSError as error:
            file.unlink()
            raise OSError(error.errno, f"{error.strerror}, for {size} bytes", str(file)) from error
        return mmap.mmap(made.fileno(), size)


def _padded(size: int) -> int:
    """Return the bytes set aside for a tensor; an empty one has some, or it would look tied."""
    return -(-max(size, 1) // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class RememberedPart(Part):
    """What a part was, recalled from what it is now.

    An element's place in the order of values has moved little, so its last eight bits tell which it
    was. Elements with the smallest magnitudes, which may move far, are noted whole.
    """

    low: Tensor
    rare: Tensor
    whole: Tensor

    def elements(self, begin: int, end: int) -> Tensor:
        """Return the bits of old elements, in memory of their own."""
        floats = layout_of(self.piece.dtype).floats
        now = super().elements(begin, end).cpu()
        before = _cpu.delta_recall(now, self.low[begin:end], floats)
        first, last = torch.searchsorted(self.rare, torch.tensor([begin, end])).tolist()
        before[self.rare[first:last] - begin] = self.whole[first:last]
        return before


def remembered(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Note what parts are before a step changes them in place; tied ones stay tied.

    An element that moves by 128 units in the last place or more is recalled wrong, unless it is
    among the smallest. The sum of the version tells it.
    """
    noted = {name: _noted(part) for name, part in untied(parts).items()}
    return {
        name: replace(noted[owner], piece=parts[name].piece)
        for name, owner in owners(parts).items()
    }


def _noted(part: Part) -> Part:
    layout = layout_of(part.piece.dtype)
    low = torch.empty(part.piece.count, dtype=torch.uint8)
    limit = _smallest(part) if layout.floats and layout.itemsize > 1 else -1
    places, bits = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=layout.integers)]
    left = part.piece.count // _MOST
    for begin in range(0, part.piece.count, _AT_ONCE):
        end = min(begin + _AT_ONCE, part.piece.count)
        now = part.elements(begin, end).cpu()
        rare = (_magnitudes(now) <= limit).nonzero().flatten()
        left -= len(rare)
        if left < 0:
            return Part(part.piece, part.local.to("cpu", copy=True))
        low[begin:end] = _cpu.delta_remember(now, layout.floats)
        places.append(rare + begin)
        bits.append(now[rare])
    return RememberedPart(part.piece, part.local, low, torch.cat(places), torch.cat(bits))


def _smallest(part: Part) -> int:
    """Return the bits of a magnitude that about one in `_RARE` elements of a part is below."""
    step = max(part.piece.count // _SAMPLE, 1)
    sample = _magnitudes(bits_of(part.local.reshape(-1)[::step].cpu()))
    return int(sample.kthvalue(-(-len(sample) // _RARE)).values) if len(sample) else -1


def _magnitudes(bits: Tensor) -> Tensor:
    return bits & torch.iinfo(bits.dtype).max
