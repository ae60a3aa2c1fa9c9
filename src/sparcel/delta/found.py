"""Elements that change, with their bits, which are exchanged for those that are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.delta.change import Change
from sparcel.delta.chunk import Chunk
from sparcel.delta.parts import Part
from sparcel.delta.pieces import Piece


@dataclass(frozen=True)
class Found:
    """The changed elements of a chunk: places in it, None for all, and their bits.

    The bits are new ones, until they are exchanged for the old ones. Places follow one another
    piece by piece; within a piece they come in the order of coding. Of tensors that are gone, there
    are none. ``held`` are the elements to exchange them for, where these are in order on the host.
    """

    chunk: Chunk
    places: Tensor | None
    bits: Tensor
    held: list[_cpu.Piece] | None = None

    def pieces(self) -> Iterator[tuple[Piece, Tensor | None, Tensor]]:
        """Yield each piece that changes, the places in it, None for all, and their bits."""
        first = begin = 0
        for piece in self.chunk.pieces:
            last = first + piece.count
            if self.places is None:
                yield piece, None, self.bits[first:last]
            else:
                end = int(torch.searchsorted(self.places, last))
                if end > begin:
                    yield piece, self.places[begin:end] - first, self.bits[begin:end]
                begin = end
            first = last

    def changes(self, written_to: Mapping[str, Part] | None = None) -> Iterator[Change]:
        """Yield what changes in each tensor; once it is written, the parts have the new bits."""
        if self.chunk.code == "removed":
            for piece in self.chunk.pieces:
                yield Change.gone(piece.name, piece.dtype, piece.shape)
        for piece, places, bits in self.pieces():
            if places is not None:
                places, order = places.sort()
                bits = bits[order]
            numbers = piece.numbers(places)
            if written_to is not None:
                part = written_to[piece.name]
                _, local = part.places_of(numbers.to(part.local.device))
                bits = part.take(local).cpu()
            values = bits.view(piece.dtype)
            yield Change(piece.name, piece.dtype, piece.shape, numbers, values, self.chunk.new)

    def swap(self, parts: Mapping[str, Part]) -> None:
        """Exchange the bits for those of the elements: write new ones, or put old ones back."""
        if self.held is not None and self.places is not None:
            _cpu.delta_swap(self.held, self.places, self.bits)
            return
        for i, (piece, places, bits) in enumerate(self.pieces()):
            part = parts[piece.name]
            elements = None if self.held is None else self.held[i][0]
            if elements is not None:
                before = elements.clone()
                elements.copy_(bits)
            else:
                _, local = part.places_of(piece.numbers(places).to(part.local.device))
                before = part.take(local).cpu()
                part.put(local, bits)
            bits.copy_(before)
