"""Copies of weights, in memory or in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sparcel.delta.parts import Part, owners, untied

_ALIGNED = 64
"""Bytes: each tensor begins at a multiple of them."""


def copied(parts: Mapping[str, Part], file: Path | None = None) -> dict[str, Tensor]:
    """Copy what parts hold to the host; tied ones stay tied.

    Parameters
    ----------
    parts
        What to copy, on any device.
    file
        A file that is made anew, and then mapped; by default the copies are in memory.
    """
    alone = untied(parts)
    size = sum(_padded(part.local.nbytes) for part in alone.values())
    if file is None:
        room = torch.empty(size, dtype=torch.uint8)
    else:
        file.unlink(missing_ok=True)
        room = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
    copies, begin = {}, 0
    for name, part in alone.items():
        local = part.local
        copy = room[begin : begin + local.nbytes].view(local.dtype).view(local.shape)
        copies[name] = copy.copy_(local)
        begin += _padded(local.nbytes)
    return {name: copies[owner] for name, owner in owners(parts).items()}


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
