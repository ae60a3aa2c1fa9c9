"""Vectors in few bits a value: a program takes several whole blocks, and reads each value once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.definitions import few_bits
from sparcel.kernels.gpu._bits import widened
from sparcel.kernels.gpu._launch import launch

_TILE = 2048  # entries a program
_LONGEST = 4096  # the longest block that a program can hold

_SMALLEST = tl.constexpr(few_bits.SMALLEST)
_LARGEST = tl.constexpr(few_bits.LARGEST)
_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _limited(x, dtype: tl.constexpr, MOST: tl.constexpr):
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
def _store_scales(scales, place, scale, finite, inside, NARROW: tl.constexpr):
    """Store the bits of scales, or NaN, in int32 or, if they are ``NARROW``, in int16."""
    bits = tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000)
    if NARROW:
        bits = bits >> 16
    tl.store(scales + place, bits.to(scales.dtype.element_ty), mask=inside)


@triton.jit
def _negated(magnitude, negative):
    """Return float32 numbers, negated where told; ``0 - x`` would lose the sign of zeros."""
    bits = magnitude.to(tl.int32, bitcast=True) ^ (negative.to(tl.int32) << 31)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _step(scale, LEVELS: tl.constexpr):
    return tl.div_rn(scale, tl.zeros_like(scale) + LEVELS)


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
def _uniform(first, seed, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return random numbers ``[ROWS, WIDTH]``, those of `sparcel.kernels.philox.uniform`.

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


@triton.jit(do_not_specialize=["seed", "offset"])  # or some of them would be compiled for
def _quantize(
    x, size, seed: tl.uint64, offset, codes, code_bytes, scales, values,
    BITS: tl.constexpr, BLOCK: tl.constexpr, LOG_WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STOCHASTIC: tl.constexpr, NARROW: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    PER_BYTE: tl.constexpr = 8 // BITS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = row * BLOCK
    column = tl.arange(0, WIDTH)[None, :]
    place = first[:, None] + column
    inside = (column < BLOCK) & (place < size)
    wide = widened(tl.load(x + place, mask=inside, other=0.0))
    bits = _limited(wide, tl.float32, _FLOAT32_MAX).to(tl.int32, bitcast=True)
    largest_bits = tl.max(bits & 0x7FFFFFFF, axis=1)
    finite = largest_bits < 0x7F800000
    bits = tl.where(finite[:, None], bits, 0)  # a block that is not finite has the code 0
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    negative = bits < 0
    if BITS == 2 and not STOCHASTIC:
        length = tl.maximum(tl.minimum(size - first, BLOCK), 1)  # of blocks past the end, too
        low, high, above = _two_means(magnitude, length, ROWS, LOG_WIDTH)
        low = _rounded(low, NARROW, False)
        high = _rounded(high, NARROW, False)
        _store_scales(scales, 2 * row, low, finite, first < size, NARROW)
        _store_scales(scales, 2 * row + 1, high, finite, first < size, NARROW)
        level = above.to(tl.int32)
        decoded = tl.where(above, high[:, None], low[:, None])
    else:
        largest = tl.where(finite, largest_bits, 0).to(tl.float32, bitcast=True)
        scale = _rounded(tl.minimum(largest, _LARGEST), NARROW, STOCHASTIC)
        if not STOCHASTIC:
            scale = tl.where(largest < _SMALLEST, 0.0, scale)
        # Without a scale, any other number leads to the level 0.
        divisor = tl.where(scale > 0, scale, 1.0)
        # The kernel is compiled without fused operations: both products here are rounded.
        if STOCHASTIC:
            exact = tl.div_rn(magnitude, divisor[:, None]) * LEVELS
            level = exact.to(tl.int32)
            random = _uniform(offset + first, seed, ROWS, WIDTH)
            level += (random < exact - level.to(tl.float32)).to(tl.int32)
        else:
            inverse = tl.div_rn(tl.zeros_like(divisor) + LEVELS, divisor)
            level = (magnitude * inverse[:, None] + 0.5).to(tl.int32)
        level = tl.minimum(level, LEVELS)
        negative = negative & (level > 0)
        _store_scales(scales, row, scale, finite, first < size, NARROW)
        decoded = level.to(tl.float32) * _step(scale, LEVELS)[:, None]
    decoded = tl.where(finite[:, None], _negated(decoded, negative), float("nan"))
    tl.store(values + place, _limited(decoded, values.dtype.element_ty, MOST), mask=inside)

    code = (level | (negative.to(tl.int32) << (BITS - 1))) << ((column % PER_BYTE) * BITS)
    packed = tl.sum(tl.reshape(code, [ROWS, WIDTH // PER_BYTE, PER_BYTE]), axis=2)
    column = tl.arange(0, WIDTH // PER_BYTE)[None, :]
    place = (row * (BLOCK // PER_BYTE))[:, None] + column
    inside = (column < BLOCK // PER_BYTE) & (place < code_bytes)
    tl.store(codes + place, packed.to(tl.uint8), mask=inside)


@triton.jit
def _dequantize(
    codes, code_bytes, scales, size, values,
    BITS: tl.constexpr, BLOCK: tl.constexpr, LOG_WIDTH: tl.constexpr, ROWS: tl.constexpr,
    TWO_SCALES: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    PER_BYTE: tl.constexpr = 8 // BITS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = row * BLOCK
    column = tl.arange(0, WIDTH // PER_BYTE)[None, :]
    place = (row * (BLOCK // PER_BYTE))[:, None] + column
    inside = (column < BLOCK // PER_BYTE) & (place < code_bytes)
    packed = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    shift = tl.arange(0, PER_BYTE)[None, None, :] * BITS
    code = tl.reshape((packed[:, :, None] >> shift) & (2 * LEVELS + 1), [ROWS, WIDTH])
    if TWO_SCALES:
        low = tl.load(scales + 2 * row, mask=first < size, other=0.0)
        high = tl.load(scales + 2 * row + 1, mask=first < size, other=0.0)
        magnitude = tl.where((code & 1) != 0, widened(high)[:, None], widened(low)[:, None])
    else:
        scale = tl.load(scales + row, mask=first < size, other=0.0)
        magnitude = (code & LEVELS).to(tl.float32) * _step(widened(scale), LEVELS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    place = first[:, None] + column
    inside = (column < BLOCK) & (place < size)
    tl.store(values + place, _negated(magnitude, code > LEVELS), mask=inside)


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
    codes = x.new_empty(-(-size * bits // 8), dtype=torch.uint8)
    scales = x.new_empty(few_bits.scales_count(size, bits, block, stochastic), dtype=scale)
    values = torch.empty_like(x)
    log_width, rows, programs = _tiles(size, block)
    launch(
        _quantize, programs, x, size, 0 if seed is None else seed % 2**64, offset, codes,
        codes.numel(), scales.view(torch.int16 if narrow else torch.int32), values,
        BITS=bits, BLOCK=block, LOG_WIDTH=log_width, ROWS=rows,
        STOCHASTIC=stochastic, NARROW=narrow,
        MOST=min(torch.finfo(x.dtype).max, _FLOAT32_MAX.value), enable_fp_fusion=False,
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
