"""Vectors in few bits a value: a program takes several whole blocks, and reads each value once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel.kernels.definitions import few_bits
from sparcel.kernels.gpu._bits import widened
from sparcel.kernels.gpu._coding import (
    decode_rows,
    encode_rows,
    load_codes,
    scale_bits,
    store_codes,
)
from sparcel.kernels.gpu._launch import launch

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


@triton.jit
def _eights(row, beyond, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
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
    eight = _eights(row, code_bytes, BLOCK, ROWS, WIDTH)
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
    eight = _eights(row, code_bytes, BLOCK, ROWS, WIDTH)
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
