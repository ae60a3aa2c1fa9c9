"""Copies of weights, in memory or in a file."""

from __future__ import annotations

import os
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

    Raises
    ------
    OSError
        If the file cannot be made, or there is no room for it.
    """
    alone = untied(parts)
    size = sum(_padded(part.local.nbytes) for part in alone.values())
    if file is None or not size:
        room = torch.empty(size, dtype=torch.uint8)
    else:
        _make(file, size)
        room = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
    copies, begin = {}, 0
    for name, part in alone.items():
        local = part.local
        copy = room[begin : begin + local.nbytes].view(local.dtype).view(local.shape)
        copies[name] = copy.copy_(local)
        begin += _padded(local.nbytes)
    return {name: copies[owner] for name, owner in owners(parts).items()}


def _make(file: Path, size: int) -> None:
    """Make a file that has its room on the disk: a write to mapped memory without it kills."""
    file.unlink(missing_ok=True)
    with file.open("xb") as made:
        try:
            os.posix_fallocate(made.fileno(), 0, size)
        except OSError as error:
            file.unlink()
            raise OSError(error.errno, f"{error.strerror}, for {size} bytes", str(file)) from error


def _padded(size: int) -> int:
    """Return the room of a tensor: an empty one has some, or it would be tied to the next."""
    return -(-max(size, 1) // _ALIGNED) * _ALIGNED
