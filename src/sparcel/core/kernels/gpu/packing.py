"""Sorted indices in few bits each; a lane packs an index, and unpacks a bit of the bitmap."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.core.kernels.definitions.packing import WORD, check_length, layout, packed_words
from sparcel.core.kernels.definitions.select import index_dtype
from sparcel.core.kernels.gpu._base import GROUP, add_span, before_span, groups_length, launch

_TILE = 1024  # indices a program packs
_WORDS, _TILES = 32, 4  # words of the bitmap in a tile, and tiles that a program unpacks

_HEADER, _MOST_PARTS = 5, 3  # words of a message's header, and parts after it

# These differ from call to call, and must not have kernels compiled for their divisors.
_COUNTS = ["count", "low_bits", "low_mask", "bitmap_bits"]


@triton.jit
def _words_of(part, nbytes, word):
    """Return words of a part that begin at its bytes, filled up with zeros."""
    place = word * 8
    whole = (word >= 0) & (place + 8 <= nbytes)
    content = tl.load(part.to(tl.pointer_type(tl.int64)) + word, mask=whole, other=0)
    last = (word >= 0) & (whole == 0)
    for byte in tl.static_range(7):
        inside = last & (place + byte < nbytes)
        found = tl.load(part.to(tl.pointer_type(tl.uint8)) + place + byte, mask=inside, other=0)
        content |= found.to(tl.int64) << (8 * byte)
    return content


@triton.jit(do_not_specialize=["h0", "h1", "h2", "h3", "h4", "void", "bytes0", "bytes1", "bytes2"])
def _join(
    part0, part1, part2, bytes0, bytes1, bytes2, finite, void, h0, h1, h2, h3, h4, message,
    HEADER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the words of a message, or those of its payload if the ``HEADER`` has none."""
    word = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    start = tl.full([], HEADER, tl.int64)
    content = _words_of(part0, bytes0, word - start)
    start += (bytes0 + 7) // 8
    content |= _words_of(part1, bytes1, word - start)
    start += (bytes1 + 7) // 8
    content |= _words_of(part2, bytes2, word - start)
    start += (bytes2 + 7) // 8
    if HEADER > 0:
        first = h0 | tl.where(tl.load(finite) != 0, 0, void)
        content = tl.where(word == 0, first, content)
        content = tl.where(word == 1, h1, content)
        content = tl.where(word == 2, h2, content)
        content = tl.where(word == 3, h3, content)
        content = tl.where(word == 4, h4, content)
    tl.store(message + word, content, mask=word < start)


@triton.jit(do_not_specialize=_COUNTS)
def _pack(
    indices, count, low_bits, low_mask, bitmap_bits, words,
    PLAIN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Only a ``PLAIN`` bitmap has no low bits. An OR of bits does not depend on their order."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = i < count
    index = tl.load(indices + i, mask=inside, other=0).to(tl.int64)
    one = tl.full([TILE], 1, tl.int64)
    bit = index
    if not PLAIN:
        bit = (index >> low_bits) + i
    fits = inside & (bit >= 0) & (bit < bitmap_bits)  # so do all that are sorted and in range
    tl.atomic_or(words + (bit >> 6), one << (bit & 63), mask=fits, sem="relaxed")
    if not PLAIN:
        low = index & low_mask
        start = bitmap_bits + i * low_bits
        word, skipped = start >> 6, start & 63
        tl.atomic_or(words + word, low << skipped, mask=inside, sem="relaxed")
        # Two shifts, because one by 64 is undefined.
        rest = (low >> 1) >> (63 - skipped)
        tl.atomic_or(words + word + 1, rest, mask=inside & (skipped + low_bits > 64), sem="relaxed")


@triton.jit
def _bitmap(words, word, bitmap_bits):
    """Return the bits ``[len(word), 64]`` of words, int32, and their places."""
    place = word[:, None] * 64 + tl.arange(0, 64)[None, :]
    content = tl.load(words + word, mask=(word >= 0) & (word * 64 < bitmap_bits), other=0)
    bits = (content[:, None] >> tl.arange(0, 64)[None, :]) & 1
    return tl.where(place < bitmap_bits, bits, 0).to(tl.int32), place


@triton.jit
def _low(words, number, inside, low_bits, low_mask, bitmap_bits):
    """Return the low bits of the indices of these numbers."""
    start = bitmap_bits + number * low_bits
    word, skipped = start >> 6, start & 63
    goes_on = inside & (skipped + low_bits > 64)
    content = tl.load(words + word, mask=inside, other=0).to(tl.uint64, bitcast=True)
    rest = tl.load(words + word + 1, mask=goes_on, other=0) << 1
    low = (content >> skipped.to(tl.uint64)).to(tl.int64, bitcast=True)
    return (low | (rest << (63 - skipped))) & low_mask


@triton.jit(do_not_specialize=["bitmap_bits"])
def _count(
    words, bitmap_bits, counts, work,
    TILES: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    count = 0
    for tile in range(TILES):
        word = (program * TILES + tile) * WORDS + tl.arange(0, WORDS)
        bits, _ = _bitmap(words, word, bitmap_bits)
        count += tl.sum(tl.sum(bits, axis=1), axis=0)
    add_span(work + 2, 0, work + 1, counts, program, count, GROUP)


@triton.jit(do_not_specialize=["size", *_COUNTS])
def _unpack(
    words, size, count, low_bits, low_mask, bitmap_bits, counts, work, indices,
    PLAIN: tl.constexpr, TILES: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Whatever the words are, only ``count`` numbers have a place, and low bits that are there.

    Of two indices of one bitmap bit after another, the upper bits are the same.
    """
    program = tl.program_id(0).to(tl.int64)
    if program == 0:
        tl.store(work, 1, mask=tl.load(work + 1) != count)
    before = before_span(work + 2, 0, counts, program, GROUP)
    for tile in range(TILES):
        word = (program * TILES + tile) * WORDS + tl.arange(0, WORDS)
        bits, place = _bitmap(words, word, bitmap_bits)
        of_word = tl.sum(bits, axis=1)
        first = before + tl.cumsum(of_word, axis=0) - of_word
        before += tl.sum(of_word, axis=0)
        number = first[:, None] + tl.cumsum(bits, axis=1) - bits
        kept = (bits != 0) & (number < count)
        index = place
        if not PLAIN:
            low = _low(words, number, kept, low_bits, low_mask, bitmap_bits)
            index = ((place - number) << low_bits) | low
            ahead = tl.load(words + (place - 1 >> 6), mask=kept & (place > 0), other=0)
            follows = kept & (((ahead >> ((place - 1) & 63)) & 1) != 0)
            last = _low(words, number - 1, follows, low_bits, low_mask, bitmap_bits)
            wrong = (follows & (last >= low)) | (kept & ((index < 0) | (index >= size)))
            tl.store(work, 1, mask=tl.max(tl.max(wrong.to(tl.int32), axis=1), axis=0) > 0)
        tl.store(indices + number, index.to(indices.dtype.element_ty), mask=kept)


def join_message(
    parts: Sequence[Tensor], header: bytes, finite: Tensor | None = None, void: int = 0
) -> tuple[Tensor, ...]:
    words = struct.unpack(f"{_HEADER}q", header)
    parts = [part if part.data_ptr() % WORD == 0 else part.clone() for part in parts]
    lengths = [part.nbytes for part in parts]
    size = sum(-(-nbytes // WORD) for nbytes in lengths)
    check_length(header, size * WORD)
    before = 0 if finite is None else _HEADER
    size += before
    message = parts[0].new_empty(size, dtype=torch.int64)
    missing = _MOST_PARTS - len(parts)
    launch(
        _join, triton.cdiv(size, _TILE), *parts, *parts[:1] * missing, *lengths, *[0] * missing,
        message if finite is None else finite.view(torch.uint8), void, *words, message,
        HEADER=before, TILE=_TILE,
    )  # fmt: skip
    content = message.view(torch.uint8)
    if finite is None:
        return torch.frombuffer(bytearray(header), dtype=torch.uint8), content
    return (content,)


def pack_indices(indices: Tensor, size: int) -> Tensor:
    count = indices.numel()
    low_bits, bitmap_bits = layout(count, size)
    words = indices.new_zeros(packed_words(count, size), dtype=torch.int64)
    launch(
        _pack, triton.cdiv(count, _TILE), indices, count, low_bits, (1 << low_bits) - 1,
        bitmap_bits, words,
        PLAIN=low_bits == 0, TILE=_TILE,
    )  # fmt: skip
    return words


def unpack_indices(words: Tensor, count: int, size: int) -> tuple[Tensor, bool | Tensor]:
    indices = words.new_empty(count, dtype=index_dtype(size))
    if count == 0:
        return indices, False
    low_bits, bitmap_bits = layout(count, size)
    programs = triton.cdiv(bitmap_bits, 64 * _WORDS * _TILES)
    counts = words.new_empty(programs, dtype=torch.int32)
    # The fault, the count of all bits, and those of groups of programs.
    work = words.new_zeros(2 + groups_length(programs))
    shape = {"TILES": _TILES, "WORDS": _WORDS, "GROUP": GROUP}
    launch(_count, programs, words, bitmap_bits, counts, work, **shape)
    launch(
        _unpack, programs, words, size, count, low_bits, (1 << low_bits) - 1, bitmap_bits, counts,
        work, indices,
        PLAIN=low_bits == 0, **shape,
    )  # fmt: skip
    return indices, work[:1].view(torch.bool)[0]
