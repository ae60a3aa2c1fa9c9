"""What each rank of a sharded trainer holds of a model, and which of that it publishes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparcel.comm import ALL_CONTROL, Communicator
from sparcel.delta.bits import key_of, signed
from sparcel.delta.casting import Cast, served
from sparcel.delta.files import NOTHING_TO_PUBLISH, check_storable
from sparcel.delta.parts import Part, Weights, owners, parts_of, tensors_of
from sparcel.delta.pieces import Piece
from sparcel.errors import InputError, MismatchError, shown


@dataclass(frozen=True)
class Held:
    """What a rank holds of a tensor, and what all ranks that hold some of it must know alike."""

    piece: Piece
    kind: int

    def row(self) -> tuple[int, ...]:
        """Return it as numbers of 64 bits: the name, the kind, and the elements."""
        one = self.piece
        name = key_of(one.name, torch.uint8, ())
        elements = (one.first, one.row, one.stride, one.count) if one.count else (0,) * 4
        return signed(name), signed(self.kind), *elements


def checked(weights: Weights, cast: Cast | None) -> tuple[dict[str, Part], dict[str, Held]]:
    """Return the parts that this rank holds, and what it tells others of them."""
    tensors = served(tensors_of(weights), cast)
    parts = parts_of(tensors)
    check_storable(parts)
    owner = owners(parts)
    held = {}
    for name, part in parts.items():
        placed = getattr(tensors[name], "placements", None)
        told = repr((name, placed, owner[name]))
        held[name] = Held(part.piece, key_of(told, part.piece.dtype, part.piece.shape))
    return parts, held


def gathered(held: Mapping[str, Held], comm: Communicator) -> list[Tensor]:
    """Return what each rank holds, as rows of numbers, by rank; all ranks call."""
    mine = torch.tensor([one.row() for one in held.values()], dtype=torch.int64).view(-1, 6)
    counts = comm.gather_numbers(len(mine))
    sizes = [count * mine.itemsize * mine.shape[1] for count in counts]
    octets = mine.view(torch.uint8).flatten()
    rows = comm.gather_blocks(octets, sizes, ALL_CONTROL).view(torch.int64).view(-1, 6)
    return list(rows.split(counts))


def owned(held: Mapping[str, Held], everywhere: Sequence[Tensor], rank: int) -> set[str]:
    """Return the names of the tensors whose elements a rank publishes, as far as it holds them.

    Of ranks that hold the same elements, the first one publishes them.

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
        If no rank has a tensor, or ranks together do not hold each element of each tensor in one
        piece.
    MismatchError
        If ranks hold different tensors of the same name.
    """
    if not any(map(len, everywhere)):
        raise InputError(NOTHING_TO_PUBLISH)
    there: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for holder, rows in enumerate(everywhere):
        for name, *rest in rows.tolist():
            there[name].append((holder, *rest))
    mine = set()
    for name, one in held.items():
        own = one.row()
        alike = there[own[0]]
        if any(kind != own[1] for _, kind, *_ in alike):
            raise MismatchError(
                f"ranks publish different tensors as {shown(name)}; dtype, shape, placement and"
                " ties must be the same on all that have it"
            )
        first: dict[tuple[int, ...], int] = {}
        for holder, _, *elements in alike:
            first.setdefault(tuple(elements), holder)
        piece = one.piece
        different = [replace(piece, first=a, row=b, stride=c, count=n) for a, b, c, n in first if n]
        if not piece.made_of(different):
            raise InputError(
                f"{shown(name)} has {piece.size} elements, and the ranks of this group hold"
                f" {sum(one.count for one in different)} in different pieces, with gaps or some"
                " twice; pass a group with all ranks that share it, which cut it in one way"
            )
        if rank in first.values() and (piece.count or not piece.size):
            mine.add(name)
    return mine
