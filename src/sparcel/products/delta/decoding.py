"""What changes in a tensor, as readers are told."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.errors import FormatError, InputError, VersionError, few, shown
from sparcel.products.delta.chunk import Chunk, read_chunk
from sparcel.products.delta.elements import (
    CHUNK_BYTES,
    Piece,
    bits_of,
    from_planes,
    hashed,
    stepped,
)
from sparcel.products.delta.header import malformed
from sparcel.products.delta.parts import Part, Weights, held, kernel_piece, kernel_pieces, parts_of

FETCH = "fetch a full version, as `Subscriber.reload()` does"
"""The advice when a delta does not fit the weights."""


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
    tied_to
        The first name of a tied tensor, which is told under all its names, if this is another one.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    indices: Tensor
    values: Tensor | None
    new: bool = False
    tied_to: str | None = None

    @classmethod
    def gone(cls, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Change:
        """Return the change that takes a tensor away."""
        return cls(name, dtype, shape, torch.empty(0, dtype=torch.int64), None)


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


def decode(chunk: bytes | memoryview | Chunk, base: Weights | None = None) -> Iterator[Change]:
    """Yield the changes that a chunk holds, for each of its tensors.

    A tied tensor is told once, under the first of its names in alphabetical order.

    Parameters
    ----------
    chunk
        What `encode` made.
    base
        The old weights. Chunks with new values do not need them, but are checked by them.

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
    if base is None and chunk.code in ("steps", "nibbles", "xor"):
        raise InputError(
            'this chunk needs the old weights: pass base=, or encode with code="values"'
        )
    yield from found_in(chunk, None if base is None else parts_of(base)).changes()


def found_in(chunk: Chunk, parts: Mapping[str, Part] | None) -> Found:
    """Decode a chunk, and check it against the old weights, where these are given."""
    if parts is None or chunk.new:
        return told_of(chunk)
    for piece in chunk.pieces:
        _check_tensor(chunk, piece, parts)
    if chunk.code == "removed":
        cuts = (cut for piece in chunk.pieces for cut in piece.cuts(CHUNK_BYTES))
        sums = (_cpu.delta_sum(kernel_pieces([cut], parts), cut.dtype.itemsize) for cut in cuts)
        _check_sum(chunk, -sum(sums))
        return told_of(chunk)
    by_places = chunk.code in ("steps", "values") and not chunk.limits
    if by_places and not on_host(chunk, parts):
        found = looked_up(told_of(chunk), parts)
        if found.chunk.changed != chunk.changed:
            raise _not_this_base(chunk)
        _check_sum(chunk, found.chunk.sum)
        return found
    old = kernel_pieces(chunk.pieces, parts)
    here = old if _in_place(chunk, parts) else None
    if chunk.code in ("dense", "xor"):
        return replace(_all_found(chunk, old), held=here)
    places, after, total = _decoded(chunk, old)
    _check_sum(chunk, total)
    return Found(chunk, places, after, here)


def _decoded(chunk: Chunk, held: list[_cpu.Piece]) -> tuple[Tensor, Tensor, int]:
    """Return places, and new bits and what they add to sums; without old ones, what is told."""
    decoded = _cpu.delta_decode(
        held,
        *chunk.layout.coded,
        chunk.code,
        chunk.shift,
        chunk.limits,
        (chunk.nibbles,) if chunk.code == "nibbles" else chunk.changes,
        np.frombuffer(chunk.streams, np.uint8),
        chunk.lengths[0],
        sum(chunk.lengths[:2]),
        sum(chunk.lengths),
    )
    if decoded is None or len(decoded[0]) != chunk.changed:
        raise _not_this_base(chunk)
    return decoded


def _all_found(chunk: Chunk, old: list[_cpu.Piece]) -> Found:
    """Take all elements of a chunk, which tells them or what they differ by."""
    told = _all_told(chunk)
    if chunk.code == "dense":
        _check_all(chunk, told, old)
        return Found(chunk, None, told)
    after, places = torch.cat(held(old)) ^ told, told.nonzero().squeeze(1)
    if len(places) != chunk.changed:
        raise _not_this_base(chunk)
    _check_all(chunk, after, old)
    return Found(chunk, places.int(), after[places])


def _all_told(chunk: Chunk) -> Tensor:
    """Return the bits that a chunk tells of all its elements: new ones, or XORs of old and new."""
    streams = chunk.streams[: chunk.lengths[2]]
    if chunk.code == "dense":
        return torch.from_numpy(np.frombuffer(streams, f"i{chunk.layout.itemsize}").copy())
    size = chunk.elements * chunk.layout.itemsize
    unpacker = zlib.decompressobj()
    with malformed("a chunk's XOR is wrong"):
        planes = unpacker.decompress(streams, size + 1)
        if len(planes) != size or not unpacker.eof:
            raise ValueError(f"it has {len(planes)} bytes instead of {size}")
    return from_planes(planes, chunk.layout.integers)


def told_of(chunk: Chunk) -> Found:
    """Decode a chunk without the old weights: its bits are new ones, steps, or XORs.

    Raises
    ------
    InputError
        If that cannot be.
    """
    if chunk.code == "removed":
        none = torch.empty(0, dtype=torch.int32)
        return Found(chunk, none, none.to(chunk.layout.integers))
    if chunk.code == "dense":
        return _all_found(chunk, []) if chunk.new else Found(chunk, None, _all_told(chunk))
    if chunk.code == "xor":
        xor = _all_told(chunk)
        places = xor.nonzero().squeeze(1)
        return Found(chunk, places.int(), xor[places])
    if chunk.limits or chunk.code == "nibbles":
        raise InputError(
            f"a chunk of version {chunk.target} can only be read with all that it tells of, which"
            f" is in {_names_in(chunk)}; publish with apart=True for readers of whole tensors, and"
            ' with code="steps" for others (of packed values, "values")'
        )
    return Found(chunk, *_decoded(chunk, kernel_pieces(chunk.pieces, None))[:2])


def looked_up(told: Found, parts: Mapping[str, Part]) -> Found:
    """Find old and new bits where the tensors are: only what changes travels.

    What is not there is left out. The sum of the chunk that is returned is that of what is there.
    """
    chunk, total, first = told.chunk, 0, 0
    pieces, places_of, afters = [], [torch.empty(0, dtype=torch.int32)], [told.bits[:0]]
    for piece, places, values in told.pieces():
        part = parts.get(piece.name)
        if part is None:
            continue
        _check_tensor(chunk, piece, parts)
        places = torch.arange(piece.count) if places is None else places
        numbers = piece.numbers(places).to(part.local.device)
        here, local = part.places_of(numbers)
        before, after = part.take(local), values.to(part.local.device)[here]
        if chunk.code == "steps":
            after = stepped(before, after, chunk.layout.floats, chunk.shift)
        elif chunk.code == "xor":
            after = before ^ after
        for bits, sign in ((after, 1), (before, -1)):
            total += sign * hashed(piece.key, numbers[here], bits)
        pieces.append(piece)
        places_of.append(places[here.cpu()].int() + first)
        afters.append(after.cpu())
        first += piece.count
    bits = torch.cat(afters)
    told_here = replace(
        chunk, code="values", pieces=tuple(pieces), limits=(), changes=(len(bits),), sum=total
    )
    return Found(told_here, torch.cat(places_of), bits)


def new_tensors(found: Iterable[Found]) -> dict[str, Tensor]:
    """Put new tensors together from their pieces."""
    pieces: dict[str, list[tuple[Piece, Tensor]]] = {}
    for one in found:
        for piece, _, bits in one.pieces():
            pieces.setdefault(piece.name, []).append((piece, bits))
    tensors = {}
    for name, mine in pieces.items():
        dtype, shape = mine[0][0].dtype, mine[0][0].shape
        if any((piece.dtype, piece.shape) != (dtype, shape) for piece, _ in mine):
            raise FormatError(f"the new tensor '{shown(name)}' has pieces of several shapes")
        if not mine[0][0].made_of(piece for piece, _ in mine):
            raise FormatError(
                f"the new tensor '{shown(name)}' is there in part only, or in part twice"
            )
        tensors[name] = torch.zeros(shape, dtype=dtype)
        flat = bits_of(tensors[name]).view(-1)
        for piece, bits in mine:
            end = piece.first + piece.count
            flat[slice(piece.first, end) if piece.ranges else piece.numbers()] = bits
    return tensors


def on_host(chunk: Chunk, parts: Mapping[str, Part]) -> bool:
    """Tell whether all tensors of a chunk are on the host."""
    return all(parts[piece.name].local.device.type == "cpu" for piece in chunk.pieces)


def _in_place(chunk: Chunk, parts: Mapping[str, Part]) -> bool:
    """Tell whether `kernel_pieces` returns those of the tensors, and not copies."""
    there = ((piece, parts[piece.name]) for piece in chunk.pieces)
    return on_host(chunk, parts) and all(
        part.bits.is_contiguous() and part.begin_of(piece) is not None for piece, part in there
    )


def _check_sum(chunk: Chunk, total: int) -> None:
    """Raise VersionError unless changes add to the version's sum what the chunk states."""
    if (total - chunk.sum) % (1 << 64):
        raise _not_this_base(chunk)


def _not_this_base(chunk: Chunk) -> VersionError:
    """Return the error for weights that a chunk was not made for."""
    return VersionError(
        f"chunk {chunk.part} of version {chunk.target} does not fit these weights"
        f" ({_names_in(chunk)}): they are not version {chunk.base}; {FETCH}"
    )


def _names_in(chunk: Chunk) -> str:
    return ", ".join(few(sorted({piece.name for piece in chunk.pieces})))


def _check_tensor(chunk: Chunk, piece: Piece, parts: Mapping[str, Part]) -> None:
    """Raise VersionError unless a tensor is there as the chunk says."""
    part = parts.get(piece.name)
    if part is None:
        raise VersionError(
            f"version {chunk.target} changes the tensor '{shown(piece.name)}', which is not there;"
            f" {FETCH}"
        )
    mine = part.piece
    if (mine.dtype, mine.shape) != (piece.dtype, piece.shape):
        raise VersionError(
            f"version {chunk.target} changes '{shown(piece.name)}' as {piece.dtype}"
            f" {list(piece.shape)}, but it is {mine.dtype} {list(mine.shape)}; {FETCH}"
        )


def _check_all(chunk: Chunk, after: Tensor, old: list[_cpu.Piece]) -> None:
    """Check the sum of a chunk of which all elements are known, old ones and new ones."""
    itemsize = chunk.layout.itemsize
    now = [kernel_piece(piece, bits) for piece, _, bits in Found(chunk, None, after).pieces()]
    _check_sum(chunk, _cpu.delta_sum(now, itemsize) - _cpu.delta_sum(old, itemsize))
