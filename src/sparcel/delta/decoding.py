"""Chunks in, changes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.delta import bits
from sparcel.delta.bits import bits_of
from sparcel.delta.chunk import Chunk, read_chunk
from sparcel.delta.encoding import given
from sparcel.delta.parts import Part, Piece, parts_of
from sparcel.errors import InputError, VersionError


@dataclass(frozen=True)
class Change:
    """What changes in a tensor.

    Attributes
    ----------
    name, dtype, shape
        Of the whole tensor.
    indices
        int64, ``[k]``: the elements that change, counted row by row.
    values
        ``[k]``, of the tensor's dtype: their new values; None if the tensor is gone.
    new
        Whether the tensor was not there before. It is new as a whole, in one or several changes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    indices: Tensor
    values: Tensor | None
    new: bool = False


def decode(
    chunk: bytes | memoryview | Chunk, base: Mapping[str, Tensor] | None = None
) -> Iterator[Change]:
    """Yield the changes that a chunk holds, for each of its tensors.

    Parameters
    ----------
    chunk
        What `encode` made.
    base
        The old weights by name. Chunks with new values do not need them, but are checked by them.

    Raises
    ------
    FormatError
        If the chunk is torn or corrupt.
    VersionError
        If ``base`` is not what the chunk was made for.
    InputError
        If the chunk needs ``base``, and it is not given.
    """
    chunk = chunk if isinstance(chunk, Chunk) else read_chunk(chunk)
    if base is None and chunk.code == "steps":
        raise InputError('steps need the old weights: pass base=, or encode with code="values"')
    if chunk.code == "removed":
        for piece in chunk.pieces:
            nothing = torch.empty(0, dtype=torch.int64)
            yield Change(piece.name, piece.dtype, piece.shape, nothing, None)
        return
    parts = None if base is None or chunk.new else parts_of(base)
    yield from found_in(chunk, parts).changes()


@dataclass(frozen=True)
class Found:
    """The changed elements of a chunk: places in it, and bits before and after.

    Places follow one another piece by piece; within a piece they come in the order of coding.
    """

    chunk: Chunk
    places: Tensor
    before: Tensor | None
    after: Tensor

    def pieces(self) -> Iterator[tuple[Piece, Tensor, slice]]:
        """Yield each piece that changes, the places in it, and which of the changes these are."""
        first = begin = 0
        for piece in self.chunk.pieces:
            last = first + piece.count
            end = int(torch.searchsorted(self.places, last))
            if end > begin or self.chunk.new:
                yield piece, self.places[begin:end] - first, slice(begin, end)
            first, begin = last, end

    def changes(self) -> Iterator[Change]:
        """Yield what changes in each tensor."""
        for piece, places, which in self.pieces():
            there, order = places.sort()
            values = self.after[which][order].view(piece.dtype)
            numbers = piece.numbers(there)
            yield Change(piece.name, piece.dtype, piece.shape, numbers, values, self.chunk.new)


def found_in(chunk: Chunk, parts: Mapping[str, Part] | None) -> Found:
    """Decode a chunk, and check it by the old weights, if these are known."""
    if parts is not None:
        for piece in chunk.pieces:
            check_tensor(chunk, piece, parts)
    if chunk.code == "dense":
        return _all_found(chunk, parts)
    on_device = parts is not None and not chunk.limits and not on_host(chunk, parts)
    decoded = _cpu.delta_decode(
        elements_of(chunk, None if on_device else parts),
        chunk.layout.itemsize,
        chunk.layout.floats,
        chunk.layout.fraction,
        chunk.code == "steps",
        chunk.limits,
        chunk.changes,
        np.frombuffer(chunk.streams, np.uint8),
        chunk.lengths[0],
        sum(chunk.lengths),
        len(chunk.streams) - _cpu.CODE_SLACK,
    )
    if decoded is None:
        raise not_this_base(chunk)
    places, before, after, total = decoded
    if parts is None:
        return Found(chunk, places, None, after)
    if on_device:
        return _found_on_device(Found(chunk, places, None, after), parts)
    check_sum(chunk, total)
    return Found(chunk, places, before, after)


def elements_of(chunk: Chunk, parts: Mapping[str, Part] | None) -> list[_cpu.Piece]:
    """Return the pieces of a chunk as the compiled kernels take them, on the host."""
    if parts is None:
        return [given(piece, None) for piece in chunk.pieces]
    return [given(piece, parts[piece.name].gathered(piece)) for piece in chunk.pieces]


def on_host(chunk: Chunk, parts: Mapping[str, Part]) -> bool:
    """Tell whether all tensors of a chunk are on the host."""
    return all(parts[piece.name].local.device.type == "cpu" for piece in chunk.pieces)


def check_sum(chunk: Chunk, total: int) -> None:
    """Raise VersionError unless changes add to the version's sum what the chunk states."""
    if (total - chunk.sum) % (1 << 64):
        raise not_this_base(chunk)


def not_this_base(chunk: Chunk) -> VersionError:
    """Return the error for weights that a chunk was not made for."""
    names = ", ".join(sorted({piece.name for piece in chunk.pieces})[:3])
    return VersionError(
        f"chunk {chunk.part} of version {chunk.target} does not fit these weights ({names}): they"
        f" are not version {chunk.base}; fetch a full version"
    )


def check_tensor(chunk: Chunk, piece: Piece, parts: Mapping[str, Part]) -> None:
    """Raise VersionError unless a tensor is there as the chunk says."""
    part = parts.get(piece.name)
    if part is None:
        raise VersionError(
            f"version {chunk.target} changes the tensor {piece.name!r}, which is not there"
        )
    mine = part.piece
    if (mine.dtype, mine.shape) != (piece.dtype, piece.shape):
        raise VersionError(
            f"version {chunk.target} changes {piece.name!r} as {piece.dtype} {list(piece.shape)},"
            f" but it is {mine.dtype} {list(mine.shape)}"
        )


def _found_on_device(found: Found, parts: Mapping[str, Part]) -> Found:
    """Find old and new bits where the tensors are: only what changes travels."""
    chunk = found.chunk
    total, befores, afters = 0, [], []
    for piece, places, which in found.pieces():
        part = parts[piece.name]
        numbers = piece.numbers(places).to(part.local.device)
        here, local = part.here(numbers)
        if not bool(here.all()):
            raise not_this_base(chunk)
        before = bits_of(part.local.reshape(-1)[local])
        after = found.after[which].to(part.local.device)
        if chunk.code == "steps":
            after = bits.stepped(before, after, chunk.layout.floats)
        total += bits.hashed(piece.key, numbers, after) - bits.hashed(piece.key, numbers, before)
        befores.append(before.cpu())
        afters.append(after.cpu())
    check_sum(chunk, total)
    nothing = found.after[:0]
    before, after = torch.cat([nothing, *befores]), torch.cat([nothing, *afters])
    return Found(chunk, found.places, before, after)


def _all_found(chunk: Chunk, parts: Mapping[str, Part] | None) -> Found:
    """Take all elements of a dense chunk."""
    end = len(chunk.streams) - _cpu.CODE_SLACK
    itemsize = chunk.layout.itemsize
    after = torch.from_numpy(np.frombuffer(chunk.streams[:end], f"i{itemsize}").copy())
    split = after.split([piece.count for piece in chunk.pieces])
    now = [given(piece, one) for piece, one in zip(chunk.pieces, split, strict=True)]
    places = torch.arange(chunk.elements, dtype=torch.int32)
    if parts is None:
        if chunk.new:
            check_sum(chunk, _cpu.delta_sum(now, itemsize))
        return Found(chunk, places, None, after)
    old = elements_of(chunk, parts)
    check_sum(chunk, _cpu.delta_sum(now, itemsize) - _cpu.delta_sum(old, itemsize))
    before = torch.cat([after[:0], *(elements for elements, *_ in old if elements is not None)])
    return Found(chunk, places, before, after)
