"""Versions, of which a reader has some tensors, or slices of these, and reads little more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import SupportsIndex

import torch
from torch import Tensor

from sparcel.core._threads import in_order
from sparcel.errors import FormatError, InputError, VersionError, few, shown
from sparcel.products.delta.applying import check_together, check_writable
from sparcel.products.delta.chunk import NOTHING, Chunk, Version, read_chunk
from sparcel.products.delta.decoding import Found, found_in, looked_up, told_of
from sparcel.products.delta.elements import CHUNK_BYTES, Index, Only, Piece, piece_of_slice
from sparcel.products.delta.files import File, Listed
from sparcel.products.delta.parts import Part, Sliced, owners, parts_of, sum_of_piece
from sparcel.products.delta.prepared import Prepared


def checked_only(only: Only) -> dict[str, Index]:
    """Return a copy of what a reader has, or raise InputError."""
    if not isinstance(only, Mapping) or not only:
        raise InputError(
            "only= tells by name what is served of each tensor: all of it, which is ..., a slice of"
            " its rows, or a tuple of slices"
        )
    for name, index in only.items():
        for one in _slices(index):
            if not isinstance(one, slice) or not _is_plain(one):
                raise InputError(
                    f"only= has {shown(repr(index))} for {shown(str(name))}; it takes ..., a slice"
                    " without a step, or a tuple of these slices"
                )
    return dict(only)


def _is_plain(one: slice) -> bool:
    """Tell whether a slice has whole numbers as bounds, and no step."""
    bounds = (one.start, one.stop)
    return one.step in (None, 1) and all(
        bound is None or isinstance(bound, SupportsIndex) for bound in bounds
    )


def _slices(index: Index) -> tuple[slice, ...]:
    if index is ...:
        return ()
    return index if isinstance(index, tuple) else (index,)


@dataclass(frozen=True)
class Slice:
    """Where a slice begins, and how long it is, along each dimension of a tensor."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, index: Index, name: str, shape: tuple[int, ...]) -> Slice:
        """Return what an index has of a tensor, by torch's rules."""
        cuts = _slices(index)
        if len(cuts) > len(shape):
            raise InputError(f"only= has {len(cuts)} slices for {shown(name)}, of {list(shape)}")
        cuts += (slice(None),) * (len(shape) - len(cuts))
        bounds = [cut.indices(size)[:2] for cut, size in zip(cuts, shape, strict=True)]
        return cls(tuple(a for a, _ in bounds), tuple(max(b - a, 0) for a, b in bounds))

    def piece(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Piece:
        """Return it as a piece, or raise InputError if it is cut along too many dimensions."""
        try:
            return piece_of_slice(name, dtype, shape, self.starts, self.lengths)
        except InputError:
            raise InputError(
                f"only= cuts {shown(name)} along several dimensions, {self.lengths} of {shape}; ask"
                " for all of it along one"
            ) from None

    def rows(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return which elements the rows have that it is of: the first, and the one after them."""
        row = math.prod(shape[1:])
        first, count = (self.starts[0], self.lengths[0]) if shape else (0, 1)
        return first * row, (first + count) * row

    def of_rows(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return it in memory of its own, out of the elements of its rows."""
        held = rows.view(self.lengths[:1] + shape[1:])
        for dim in range(1, len(shape)):
            held = held.narrow(dim, self.starts[dim], self.lengths[dim])
        return held.clone(memory_format=torch.contiguous_format)


def sliced_of(files: list[File], only: Only, version: Version) -> Sliced:
    """Return slices of a whole model that files hold, as they are checked."""
    if files[0].whole:
        read, ties = _of_blocks(files[0], only, version), files[0].ties()
    else:
        read, ties = _of_chunks(files, only, version)
    for alias in only.keys() & ties.keys():
        name = ties[alias]
        if name not in only or only[name] != only[alias]:
            raise InputError(
                f"{shown(alias)} is tied to {shown(name)}; only= must have the same of both"
            )
        read[alias], read.pieces[alias] = read[name], replace(read.pieces[name], name=alias)
    if lacking := sorted(only.keys() - read.keys()):
        raise VersionError(f"version {version} has no tensors {', '.join(few(lacking))}")
    return read


def _of_blocks(file: File, only: Only, version: Version) -> Sliced:
    """Take slices of tensors, whose blocks have sums."""
    sums = file.block_sums(version)
    read, names = Sliced({}, only), [name for name in only if name in sums]
    found = in_order(lambda name: _slice_of(file, name, only, sums[name]), names)
    for name, (piece, tensor) in zip(names, found, strict=True):
        read[name], read.pieces[name] = tensor, piece
    return read


def _slice_of(file: File, name: str, only: Only, sums: list[int]) -> tuple[Piece, Tensor]:
    """Read and check the blocks that a slice lies in; return it as a piece, and its elements."""
    whole = file.piece(name)
    cut = Slice.of(only[name], name, whole.shape)
    begin, end = cut.rows(whole.shape)
    blocks = [
        (block, total)
        for block, total in zip(whole.cuts(CHUNK_BYTES), sums, strict=True)
        if block.first < end and begin < block.end
    ]
    first, last = (blocks[0][0].first, blocks[-1][0].end) if blocks else (begin, begin)
    rows = Part(replace(whole, first=first, count=last - first), file.elements(name, first, last))
    for block, total in blocks:
        if sum_of_piece(rows, block) != total:
            raise FormatError(f"{file.name} holds other elements of {shown(name)} than it says")
    there = rows.local[begin - first : end - first]
    return cut.piece(name, whole.dtype, whole.shape), cut.of_rows(there, whole.shape)


def _of_chunks(files: list[File], only: Only, version: Version) -> tuple[Sliced, dict[str, str]]:
    """Put slices together from the chunks of several processes; return the version's ties, too."""
    read, seen = Sliced({}, only), list[Chunk]()
    there: dict[str, Tensor] = {}
    for file in files:
        for chunk in chunks_of(file, only, NOTHING, version):
            seen.append(replace(chunk, streams=b""))
            if any(piece.name in only for piece in chunk.pieces):
                for piece, _, bits in found_in(chunk, None).pieces():
                    if piece.name in only:
                        _put(read, there, piece, bits)
    check_together(seen, some=True)
    for name, found in there.items():
        if not bool(found.all()):
            raise FormatError(f"{shown(name)} is there in part only")
    return read, {alias: name for chunk in seen for alias, name in chunk.ties.items()}


def _put(read: Sliced, there: dict[str, Tensor], piece: Piece, bits: Tensor) -> None:
    """Write the bits of a piece that are of a slice, and note which elements are there."""
    name, shape = piece.name, piece.shape
    if name not in read:
        cut = Slice.of(read.only[name], name, shape)
        read[name] = torch.empty(cut.lengths, dtype=piece.dtype)
        read.pieces[name] = cut.piece(name, piece.dtype, shape)
        there[name] = torch.zeros(read[name].numel(), dtype=torch.bool)
    part = Part(read.pieces[name], read[name])
    here, places = part.places_of(piece.numbers())
    if bool(there[name][places].any()):
        raise FormatError(f"{shown(name)} is there in part twice")
    there[name][places] = True
    part.put(places, bits[here])


def chunks_of(file: File, only: Only, base: Version, version: Version) -> Iterator[Chunk]:
    """Yield the chunks of a file that may tell of slices, and the last one."""
    listed = file.listed()
    wanted = [one for one in listed if one is listed[-1] or _concerns(one, only)]
    for one, data in zip(wanted, file.some(wanted), strict=True):
        chunk = read_chunk(data)
        if (chunk.base, chunk.target, chunk.part) != (base, version.number, one.number):
            raise FormatError(
                f"chunk {one.number} of {file.name} says that it is {chunk.part}, and makes version"
                f" {chunk.target} of {chunk.base}, instead of {version.number} of {base}"
            )
        yield chunk


def _concerns(listed: Listed, only: Only) -> bool:
    """Tell whether a chunk may tell of what a reader has."""
    name = listed.name
    if name is None or name not in only:
        return name is None
    begin, end = Slice.of(only[name], name, listed.shape).rows(listed.shape)
    return listed.first == 0 if begin == end else listed.first < end and begin < listed.end


def prepare_slices(target: Sliced, chunks: list[Chunk], version: Version) -> Prepared:
    """Decode what chunks tell of slices, and check it as far as these have all that a chunk tells.

    Raises
    ------
    FormatError
        If tensors come, go or are tied to others, which is for the next whole model to tell.
    InputError
        If a chunk can only be decoded by whoever has all that it tells of.
    VersionError
        If the slices are not those of the chunks' base.
    """
    parts = parts_of(target)
    check_writable(parts, target)
    mine = [chunk for chunk in chunks if any(_is_here(piece, parts) for piece in chunk.pieces)]
    new = {piece.name for chunk in mine if chunk.new for piece in chunk.pieces}
    if moved := sorted(new.union(*(chunk.leaving for chunk in chunks)) & parts.keys()):
        raise FormatError(f"version {version} takes away or adds {', '.join(few(moved))}")
    ties = {alias: name for chunk in chunks for alias, name in chunk.ties.items()}
    retied = [name for name, owner in owners(parts).items() if ties.get(name, name) != owner]
    if retied:
        raise FormatError(f"version {version} ties {', '.join(few(retied))} to other tensors")
    found = list(in_order(partial(_found_in, parts=parts), mine))
    return Prepared(
        chunks[0].base,
        version,
        dict(target),
        sum(one.chunk.changed for one in found),
        target,
        parts,
        found,
        {alias: name for alias, name in ties.items() if alias in parts},
    )


def _is_here(piece: Piece, parts: Mapping[str, Part]) -> bool:
    return piece.name in parts and piece.meets(parts[piece.name].piece)


def _found_in(chunk: Chunk, parts: Mapping[str, Part]) -> Found:
    """Decode what a chunk tells of slices; what they have all of is checked, too."""
    whole = all(
        piece.name in parts and parts[piece.name].begin_of(piece) is not None
        for piece in chunk.pieces
    )
    return found_in(chunk, parts) if whole else looked_up(told_of(chunk), parts)
