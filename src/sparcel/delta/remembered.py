"""What weights were before a step of the optimiser, in one byte an element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.delta.bits import bits_of, layout_of
from sparcel.delta.parts import Part, owners, parts_of, untied

_RARE = 128
"""One in so many elements, those with the smallest magnitudes, is noted whole."""

_MOST = 16
"""Where more than one in so many would be, as among weights of which many are zero, all are copied:
each takes up to ten bytes more."""

_AT_ONCE = 1 << 20
"""Elements that are looked at together."""

_SAMPLE = 1 << 13


@dataclass(frozen=True)
class RememberedPart(Part):
    """What a part was, told from what it is.

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


def remembered(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """Note what tensors are, until a step has changed them in place; tied ones stay tied.

    An element that moves by 128 units in the last place or more is recalled wrong, unless it is
    among the smallest. The sum of the version tells it.
    """
    parts = parts_of(tensors)
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
