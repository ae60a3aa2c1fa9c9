"""Vectors in few bits a value: a program takes several whole blocks, and reads each value once.

A row of a tile is a block, and shares a scale, or two; its values beyond the end are 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.core.kernels.definitions import few_bits
from sparcel.core.kernels.gpu._base import is_infinite, launch, widened


@triton.jit
def _rounded(scale, NARROW: tl.constexpr, UP: tl.constexpr):
    """Return float32 scales, which bfloat16 can hold if they are to be ``NARROW``."""
    if NARROW:
        bits = scale.to(tl.int32, bitcast=True)
        if UP:
            bits += 0xFFFF
        else:
            bits += 0x7FFF + ((bits >> 16) & 1)
        scale = (tl.minimum(bits >> 16, 0x7F7F) << 16).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _sum_by_halves(rows, ROWS: tl.constexpr, LOG_WIDTH: tl.constexpr):
    """Return the sums of rows; there are two numbers in each sum of Triton's, so no order."""
    for i in tl.static_range(LOG_WIDTH):
        rows = tl.sum(tl.reshape(rows, [ROWS, 2, 1 << (LOG_WIDTH - 1 - i)]), axis=1)
    return tl.reshape(rows, [ROWS])


@triton.jit
def _two_means(magnitude, length, ROWS: tl.constexpr, LOG_WIDTH: tl.constexpr):
    wide = magnitude.to(tl.float64)
    count = length.to(tl.float64)
    total = _sum_by_halves(wide, ROWS, LOG_WIDTH)
    above = wide > (total / count)[:, None]
    larger = tl.sum(above.to(tl.int32), axis=1).to(tl.float64)
    upper = _sum_by_halves(tl.where(above, wide, 0.0), ROWS, LOG_WIDTH)
    # Where none are larger, their sum is 0, and so is what takes the place of their mean.
    high = upper / tl.maximum(larger, 1.0)
    return ((total - upper) / (count - larger)).to(tl.float32), high.to(tl.float32), above


@triton.jit
def encode_rows(
    x, length, random, BITS: tl.constexpr, ROWS: tl.constexpr, LOG_WIDTH: tl.constexpr,
    STOCHASTIC: tl.constexpr, NARROW: tl.constexpr,
    SMALLEST: tl.constexpr = few_bits.SMALLEST, LARGEST: tl.constexpr = few_bits.LARGEST,
):  # fmt: skip
    """Return the codes (int32) of float32 rows, their scales, and which rows are finite.

    ``length`` is how many values a row has, at least 1. Where it has one scale, that comes twice.
    ``random`` has a number for each value if rounding is ``STOCHASTIC``. The kernel must be
    compiled without fused operations: all products here are rounded. The last parameters keep their
    values; they are no global numbers, because Triton compares these at each launch.
    """
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    bits = x.to(tl.int32, bitcast=True)
    largest_bits = tl.max(bits & 0x7FFFFFFF, axis=1)
    finite = is_infinite(largest_bits) == 0
    bits = tl.where(finite[:, None], bits, 0)  # a row that is not finite has the code 0
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    negative = bits < 0
    if BITS == 2 and not STOCHASTIC:
        low, high, above = _two_means(magnitude, length, ROWS, LOG_WIDTH)
        low = _rounded(low, NARROW, False)
        high = _rounded(high, NARROW, False)
        level = above.to(tl.int32)
    else:
        largest = tl.where(finite, largest_bits, 0).to(tl.float32, bitcast=True)
        scale = _rounded(tl.minimum(largest, LARGEST), NARROW, STOCHASTIC)
        if not STOCHASTIC:
            scale = tl.where(largest < SMALLEST, 0.0, scale)
        # Without a scale, any other number leads to the level 0.
        divisor = tl.where(scale > 0, scale, 1.0)
        if STOCHASTIC:
            exact = tl.div_rn(magnitude, divisor[:, None]) * LEVELS
            level = exact.to(tl.int32)
            level += (random < exact - level.to(tl.float32)).to(tl.int32)
        else:
            inverse = tl.div_rn(tl.zeros_like(divisor) + LEVELS, divisor)
            level = (magnitude * inverse[:, None] + 0.5).to(tl.int32)
        level = tl.minimum(level, LEVELS)
        negative = negative & (level > 0)
        low, high = scale, scale
    code = level | (negative.to(tl.int32) << (BITS - 1))
    return code, tl.where(finite, low, float("nan")), tl.where(finite, high, float("nan")), finite


@triton.jit
def decode_rows(code, low, high, BITS: tl.constexpr, TWO_SCALES: tl.constexpr):
    """Return the values of codes ``[ROWS, WIDTH]``, in float32; the second of two scales is for
    odd codes.
    """
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    if TWO_SCALES:
        magnitude = tl.where((code & 1) != 0, high[:, None], low[:, None])
    else:
        step = tl.div_rn(low, tl.zeros_like(low) + LEVELS)
        magnitude = (code & LEVELS).to(tl.float32) * step[:, None]
    # ``0 - x`` would lose the sign of zeros.
    bits = magnitude.to(tl.int32, bitcast=True) ^ ((code > LEVELS).to(tl.int32) << 31)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_bits(scale, NARROW: tl.constexpr):
    """Return the bits of scales of `encode_rows`, as int32; those of bfloat16 if ``NARROW``."""
    bits = tl.where(scale == scale, scale.to(tl.int32, bitcast=True), 0x7FC00000)
    if NARROW:
        bits = bits >> 16
    return bits


@triton.jit
def _wide(codes, BITS: tl.constexpr):
    """Return whole numbers as ones that hold 8 codes."""
    if BITS > 4:
        codes = codes.to(tl.int64)
    return codes


@triton.jit
def _eights(codes, BITS: tl.constexpr):
    """Return pointers to 8 codes each, where these have 16, 32 or 64 bits."""
    if BITS == 2:
        eights = codes.to(tl.pointer_type(tl.int16), bitcast=True)
    elif BITS == 4:
        eights = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        eights = codes.to(tl.pointer_type(tl.int64), bitcast=True)
    return eights


@triton.jit
def _bytes_of(eight, bytes, BITS: tl.constexpr):
    """Return where the bytes of 8 codes each are, which of them exist, and where their bits begin.

    There are ``BITS`` of them, in the lanes of a power of two ``[n, 2, 4 or 8]``.
    """
    LANES: tl.constexpr = 2 if BITS == 2 else 4 if BITS <= 4 else 8
    lane = tl.arange(0, LANES)[None, :]
    place = eight[:, None] * BITS + lane
    return place, (lane < BITS) & (place < bytes), 8 * lane


@triton.jit
def store_codes(codes, eight, bytes, code, BITS: tl.constexpr, PADDED: tl.constexpr):
    """Store codes as a stream of bits, 8 in so many bytes, the first in the lowest bits.

    ``eight`` has the numbers ``[n]`` of groups of 8 of them. No more than ``bytes`` are there, or
    as many more as ``PADDED`` ones have to fill words of 8 bytes.
    """
    shift = (tl.arange(0, 8) * BITS)[None, :]
    grouped = _wide(tl.reshape(code, [code.numel // 8, 8]), BITS)
    joined = tl.sum(grouped << shift, axis=1)
    if PADDED and 8 % BITS == 0:
        to = _eights(codes, BITS)
        tl.store(to + eight, joined.to(to.dtype.element_ty), mask=eight * BITS < bytes)
    else:
        place, inside, first = _bytes_of(eight, bytes, BITS)
        tl.store(codes + place, (joined[:, None] >> first).to(tl.uint8), mask=inside)


@triton.jit
def _two_words(codes, eight, bytes, BITS: tl.constexpr):
    """Return 8 codes each, of the two words of 8 bytes in which they lie, as uint64."""
    words = codes.to(tl.pointer_type(tl.uint64), bitcast=True)
    first = eight * BITS
    word, shift = first >> 3, (first & 7) << 3
    lower = tl.load(words + word, mask=first < bytes, other=0)
    goes_on = (shift + 8 * BITS > 64) & ((word + 1) << 3 < bytes)
    upper = tl.load(words + word + 1, mask=goes_on, other=0)
    # In two steps, because a shift by all 64 bits is undefined.
    return (lower >> shift.to(tl.uint64)) | (upper << 1 << (63 - shift).to(tl.uint64))


@triton.jit
def load_codes(
    codes, eight, bytes, BITS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return codes ``[ROWS, WIDTH]`` that `store_codes` stored."""
    if PADDED and 8 % BITS == 0:
        found = tl.load(_eights(codes, BITS) + eight, mask=eight * BITS < bytes, other=0)
        joined = found.to(tl.int32) if BITS <= 4 else found
    elif PADDED:
        joined = _two_words(codes, eight, bytes, BITS)
    else:
        place, inside, first = _bytes_of(eight, bytes, BITS)
        found = _wide(tl.load(codes + place, mask=inside, other=0).to(tl.int32), BITS)
        joined = tl.sum(found << first, axis=1)
    shift = (tl.arange(0, 8) * BITS)[None, :]
    code = (tl.reshape(joined, [joined.numel, 1]) >> shift) & (2**BITS - 1)
    return tl.reshape(code.to(tl.int32), [ROWS, WIDTH])


_TILE = 2048  # entries a program
_LONGEST = 4096  # the longest block that a program can hold

_FLOAT32_MAX = torch.finfo(torch.float32).max


@triton.jit
def _limited(x, dtype: tl.constexpr, MOST: tl.constexpr = _FLOAT32_MAX):
    """Return float32 or float64 numbers in ``dtype``; finite ones beyond ``MOST`` become it."""
    if x.dtype != dtype:
        x = tl.where((x > MOST) & (x < float("inf")), MOST, x)
        x = tl.where((x < -MOST) & (x > -float("inf")), -MOST, x)
    if dtype != tl.float64:
        x = x.to(tl.float32)  # torch, too, goes from float64 to 16 bits by float32
    return x.to(dtype)


@triton.jit
def _limit(x, size, result, MOST: tl.constexpr, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < size
    wide = widened(tl.load(x + place, mask=inside, other=0.0))
    tl.store(result + place, _limited(wide, result.dtype.element_ty, MOST), mask=inside)


@triton.jit
def _uniform(first, seed, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return random numbers ``[ROWS, WIDTH]``, those of `uniform` of the definitions.

    Those of a row begin at its ``first``, a multiple of 4: each block of Philox gives four numbers.
    """
    block = (first >> 2)[:, None] + tl.arange(0, WIDTH // 4)[None, :]
    word0, word1, word2, word3 = _philox(block, seed)
    pairs = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    word = tl.reshape(pairs, [ROWS, WIDTH])
    return (word >> 8).to(tl.int32).to(tl.float32) * 2.0**-24


@triton.jit
def _philox(block, seed):
    low = (block & 0xFFFFFFFF).to(tl.uint32)
    high = (block >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    return tl.philox(seed, low, high, zero, zero)


@triton.jit
def _eights_of(row, beyond, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the numbers of groups of 8 entries in rows; ``beyond`` where a row has no such one."""
    column = tl.arange(0, WIDTH // 8)[None, :]
    eight = (row * (BLOCK // 8))[:, None] + column
    return tl.reshape(tl.where(column < BLOCK // 8, eight, beyond), [ROWS * WIDTH // 8])


@triton.jit(do_not_specialize=["seed", "offset"])  # or some of them would be compiled for
def _quantize(
    x, size, seed: tl.uint64, offset, codes, code_bytes, scales, values,
    BITS: tl.constexpr, BLOCK: tl.constexpr, LOG_WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STOCHASTIC: tl.constexpr, NARROW: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    TWO_SCALES: tl.constexpr = BITS == 2 and not STOCHASTIC
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = row * BLOCK
    column = tl.arange(0, WIDTH)[None, :]
    place = first[:, None] + column
    inside = (column < BLOCK) & (place < size)
    wide = widened(tl.load(x + place, mask=inside, other=0.0))
    length = tl.maximum(tl.minimum(size - first, BLOCK), 1)  # of blocks past the end, too
    random = column
    if STOCHASTIC:
        random = _uniform(offset + first, seed, ROWS, WIDTH)
    code, low, high, _ = encode_rows(
        _limited(wide, tl.float32), length, random,
        BITS, ROWS, LOG_WIDTH, STOCHASTIC, NARROW,
    )  # fmt: skip
    decoded = decode_rows(code, low, high, BITS, TWO_SCALES)
    tl.store(values + place, _limited(decoded, values.dtype.element_ty, MOST), mask=inside)

    stored = scales.dtype.element_ty
    if TWO_SCALES:
        tl.store(scales + 2 * row, scale_bits(low, NARROW).to(stored), mask=first < size)
        tl.store(scales + 2 * row + 1, scale_bits(high, NARROW).to(stored), mask=first < size)
    else:
        tl.store(scales + row, scale_bits(low, NARROW).to(stored), mask=first < size)
    eight = _eights_of(row, code_bytes, BLOCK, ROWS, WIDTH)
    store_codes(codes, eight, code_bytes, code, BITS, False)


@triton.jit
def _dequantize(
    codes, code_bytes, scales, size, values,
    BITS: tl.constexpr, BLOCK: tl.constexpr, LOG_WIDTH: tl.constexpr, ROWS: tl.constexpr,
    TWO_SCALES: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = row * BLOCK
    eight = _eights_of(row, code_bytes, BLOCK, ROWS, WIDTH)
    code = load_codes(codes, eight, code_bytes, BITS, False, ROWS, WIDTH)
    if TWO_SCALES:
        low = widened(tl.load(scales + 2 * row, mask=first < size, other=0.0))
        high = widened(tl.load(scales + 2 * row + 1, mask=first < size, other=0.0))
    else:
        low = widened(tl.load(scales + row, mask=first < size, other=0.0))
        high = low
    decoded = decode_rows(code, low, high, BITS, TWO_SCALES)
    column = tl.arange(0, WIDTH)[None, :]
    place = first[:, None] + column
    inside = (column < BLOCK) & (place < size)
    tl.store(values + place, decoded, mask=inside)


def limited(x: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    if most >= torch.finfo(x.dtype).max:
        return x.to(dtype)
    result = torch.empty_like(x, dtype=dtype)
    launch(_limit, triton.cdiv(x.numel(), _TILE), x, x.numel(), result, MOST=most, TILE=_TILE)
    return result


def quantize(
    x: Tensor,
    bits: int,
    block: int,
    seed: int | None = None,
    offset: int = 0,
    scale: torch.dtype = torch.bfloat16,
) -> few_bits.Quantized:
    if not _fits(block) or offset % 4:
        return few_bits.quantize(x.detach(), bits, block, seed, offset, scale)
    size, stochastic, narrow = x.numel(), seed is not None, scale == torch.bfloat16
    codes = x.new_empty(few_bits.code_bytes(size, bits), dtype=torch.uint8)
    scales = x.new_empty(few_bits.scales_count(size, bits, block, stochastic), dtype=scale)
    values = torch.empty_like(x)
    log_width, rows, programs = _tiles(size, block)
    launch(
        _quantize, programs, x, size, 0 if seed is None else seed % 2**64, offset, codes,
        codes.numel(), scales.view(torch.int16 if narrow else torch.int32), values,
        BITS=bits, BLOCK=block, LOG_WIDTH=log_width, ROWS=rows,
        STOCHASTIC=stochastic, NARROW=narrow,
        MOST=min(torch.finfo(x.dtype).max, _FLOAT32_MAX), enable_fp_fusion=False,
    )  # fmt: skip
    return few_bits.Quantized(codes, scales, values)


def dequantize(codes: Tensor, scales: Tensor, size: int, bits: int, block: int) -> Tensor:
    if not _fits(block):
        return few_bits.dequantize(codes, scales, size, bits, block)
    values = scales.new_empty(size, dtype=torch.float32)
    log_width, rows, programs = _tiles(size, block)
    launch(
        _dequantize, programs, codes, codes.numel(), scales, size, values,
        BITS=bits, BLOCK=block, LOG_WIDTH=log_width, ROWS=rows,
        TWO_SCALES=scales.numel() > -(-size // block),
    )  # fmt: skip
    return values


def _fits(block: int) -> bool:
    """Tell whether the kernels take such blocks: whole bytes, not too long. The definition never
    waits for the GPU, so it takes the others.
    """
    return 0 < block <= _LONGEST and block % 8 == 0


def _tiles(size: int, block: int) -> tuple[int, int, int]:
    """Return the binary logarithm of a row's width, the rows of a tile, and how many tiles."""
    log_width = (block - 1).bit_length()
    rows = max(1, _TILE >> log_width)
    return log_width, rows, triton.cdiv(triton.cdiv(size, block), rows)
