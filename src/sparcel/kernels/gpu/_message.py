"""Messages of regions, for kernels: their headers, their parts, and their values in few bits."""

from __future__ import annotations

import triton
import triton.language as tl

from sparcel.kernels.gpu._coding import decode_rows, encode_rows, scale_bits, store_codes


@triton.jit
def header_of(lane, begins, detail, length, count, end):
    """Return words of the header of a message of ``count`` of ``length`` coordinates.

    There are five, of 64 bits: kind and flags, detail, size, count, and the length in bytes.
    """
    counts = tl.where(lane == 2, length, tl.where(lane == 3, count, end))
    return tl.where(lane == 0, begins, tl.where(lane == 1, detail, counts))


@triton.jit
def non_finite(there):
    """Return the flag for what is not finite in the first word of a header, or 0."""
    return tl.where(there, 2 << 56, 0)


@triton.jit
def is_plain(count, length):
    """Return whether the places of so many coordinates are a bitmap of all."""
    return count > (length >> 2)


@triton.jit
def codes_span(count, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return where the codes of a message of ``count`` values (int64) begin and end; the header
    takes 40 bytes.
    """
    groups = (count + (GROUP - 1)) // GROUP
    scales = 4 * groups if BITS == 2 else 2 * groups
    codes_at = 40 + ((scales + 7) >> 3 << 3)
    return codes_at, codes_at + ((count * BITS + 63) >> 6 << 3)


@triton.jit
def parts_of(count, length, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return how a message of ``count`` of ``length`` coordinates, both int64, is laid out.

    Where the codes and the places begin, the bytes of all, the bits of the bitmap, the low bits of
    an index, and whether the bitmap is one of all coordinates; see `kernels.pack_indices`.
    """
    codes_at, places_at = codes_span(count, BITS, GROUP)
    plain = is_plain(count, length)
    ratio = length // tl.maximum(count, 1)
    low_bits = tl.sum(((ratio >> tl.arange(0, 32)) > 0).to(tl.int64), axis=0) - 1
    low_bits = tl.where(plain | (count == 0), 0, low_bits)
    bitmap = tl.where(plain, length, count + ((length - 1) >> low_bits))
    bitmap = tl.where(count == 0, 0, bitmap)
    end = places_at + ((bitmap + count * low_bits + 63) >> 6 << 3)
    return codes_at, places_at, end, bitmap, low_bits, plain


@triton.jit
def bits_at(words, place, end):
    """Return bits (int32) of a bitmap, int32; 0 from ``end`` on."""
    content = tl.load(words + (place >> 5), mask=place < end, other=0)
    return (content >> (place & 31).to(tl.int32)) & 1


@triton.jit
def _scales(message, BITS: tl.constexpr):
    """Return where the scales are, after the header: one of 16 bits a row, or two."""
    if BITS == 2:
        scales = (message + 40).to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        scales = (message + 40).to(tl.pointer_type(tl.int16), bitcast=True)
    return scales


@triton.jit
def scales_at(message, row, kept, BITS: tl.constexpr):
    """Return the scales of rows of a message; the second of two is for odd codes."""
    found = tl.load(_scales(message, BITS) + row, mask=kept, other=0).to(tl.int32)
    low, high = found << 16, found & -65536
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def codes_at(message, number, count, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return a message's codes, which groups of 8 of them a tile has, and the bytes of all.

    The tile begins at a ``number`` of the message's ``count`` values.
    """
    begin, _ = codes_span(count, BITS, GROUP)
    return message + begin, number // 8 + tl.arange(0, TILE // 8), (count * BITS + 7) >> 3


@triton.jit
def write_rows(
    x, message, first, count, BITS: tl.constexpr, ROWS: tl.constexpr, LOG_GROUP: tl.constexpr
):
    """Write values, of which there are ``count``, to a message, from row ``first`` on.

    Return what rounding takes of them, and which rows are finite. Values past the last are 0.
    """
    GROUP: tl.constexpr = 1 << LOG_GROUP
    row = first + tl.arange(0, ROWS)
    length = tl.minimum(tl.maximum(count - row * GROUP, 1), GROUP)
    code, low, high, finite = encode_rows(x, length, 0, BITS, ROWS, LOG_GROUP, False, True)
    bits = scale_bits(low, True)
    if BITS == 2:
        bits = bits | (scale_bits(high, True) << 16)
    scales = _scales(message, BITS)
    tl.store(scales + row, bits.to(scales.dtype.element_ty), mask=row * GROUP < count)
    codes, eight, bytes = codes_at(message, first * GROUP, count, ROWS * GROUP, BITS, GROUP)
    store_codes(codes, eight, bytes, code, BITS, True)
    return x - decode_rows(code, low, high, BITS, BITS == 2), finite


@triton.jit
def values_at(
    message, begin, number, kept, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Return the values of a message that have these numbers, where they are ``kept``.

    Its codes ``begin`` after so many bytes.
    """
    bit = number * BITS
    byte, shift = message + begin + (bit >> 3), (bit & 7).to(tl.int32)
    found = tl.load(byte, mask=kept, other=0).to(tl.int32)
    if 8 % BITS != 0:  # a code may go on in the next byte
        goes_on = kept & (shift + BITS > 8)
        found |= tl.load(byte + 1, mask=goes_on, other=0).to(tl.int32) << 8
    code = (found >> shift) & (2**BITS - 1)
    low, high = scales_at(message, number // GROUP, kept, BITS)
    return tl.reshape(decode_rows(code[:, None], low, high, BITS, BITS == 2), [TILE])
