"""Which rank tells which parts of tensors, where ranks may hold some alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sparcel.comm import ALL_CONTROL, Communicator
from sparcel.delta.parts import Part
from sparcel.delta.pieces import Piece
from sparcel.errors import InputError


def gathered(held: Mapping[str, Piece], comm: Communicator) -> Tensor:
    """Return which elements of each tensor each rank holds, by name: int64, ``[ranks, names, 4]``.

    All ranks call, with the same names.
    """
    pieces = [held[name] for name in sorted(held)]
    rows = [
        (one.first, one.row, one.stride, one.count) if one.count else (0,) * 4 for one in pieces
    ]
    mine = torch.tensor(rows, dtype=torch.int64)
    octets, sizes = mine.view(torch.uint8).flatten(), [mine.nbytes] * comm.size
    return comm.gather_blocks(octets, sizes, ALL_CONTROL).view(torch.int64).view(-1, *mine.shape)


def owned(held: Mapping[str, Piece], everywhere: Tensor, rank: int) -> set[str]:
    """Return the names of the tensors of which a rank tells what it holds.

    Of ranks that hold the same elements, the first one does.

    Parameters
    ----------
    held
        What this rank holds of each tensor.
    everywhere
        What each rank holds, as `gathered`.
    rank
        This one.

    Raises
    ------
    InputError
        If ranks together do not hold each element of each tensor in one piece.
    """
    mine = set()
    for name, rows in zip(sorted(held), everywhere.unbind(1), strict=True):
        first: dict[tuple[int, ...], int] = {}
        for holder, row in enumerate(rows.tolist()):
            first.setdefault(tuple(row), holder)
        piece = held[name]
        different = [replace(piece, first=a, row=b, stride=c, count=n) for a, b, c, n in first if n]
        if not piece.made_of(different):
            raise InputError(
                f"{name} has {piece.size} elements, and the ranks of this group hold"
                f" {sum(one.count for one in different)} in different pieces, with gaps or some"
                " twice; pass a group with all ranks that share it, which cut it in one way"
            )
        if rank in first.values() and (piece.count or not piece.size):
            mine.add(name)
    return mine


def recut(
    before: Mapping[str, Piece],
    now: Mapping[str, Piece],
    base: Mapping[str, Part],
    parts: Mapping[str, Part],
) -> bool:
    """Return whether a rank tells other elements than before of a tensor of equal dtype and shape.

    Parameters
    ----------
    before, now
        What the rank held of each tensor of the last version, and what it holds.
    base, parts
        What it told of these, and what it tells.
    """

    def told(those: Mapping[str, Part], name: str) -> Piece | None:
        return those[name].piece if name in those else None

    return any(
        (before[name].dtype, before[name].shape) == (now[name].dtype, now[name].shape)
        and told(base, name) != told(parts, name)
        for name in before.keys() & now.keys()
    )
