"""Vectors in few bits a value, with a scale for each block of values.

Random rounding draws by Philox4x32-10: numbers that depend only on a seed and a position.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST, LARGEST = 2.0**-100, 3.4e38
"""Rounding to nearest takes blocks of smaller magnitudes for zeros. No scale is larger, so that no
level of it overflows."""


class Quantized(NamedTuple):
    """A vector ``[n]`` in few bits.

    Attributes
    ----------
    codes
        uint8 ``[code_bytes(n, bits)]``, a stream of bits that begins with the lowest of the first
        byte; the sign is the highest bit of a code.
    scales
        ``[scales_count(n, …)]``, bfloat16 or float32.
    values
        What `dequantize` makes of them, in the vector's dtype, and limited to its finite numbers.
    """

    codes: Tensor
    scales: Tensor
    values: Tensor


def scales_count(size: int, bits: int, block: int, stochastic: bool) -> int:
    """Return how many scales `quantize` needs for ``size`` values."""
    return -(-size // block) * (2 if bits == 2 and not stochastic else 1)


def code_bytes(size: int, bits: int) -> int:
    """Return how many bytes the codes of ``size`` values take."""
    return -(-size * bits // 8)


def quantize(
    x: Tensor,
    bits: int,
    block: int,
    seed: int | None = None,
    offset: int = 0,
    scale: torch.dtype = torch.bfloat16,
) -> Quantized:
    """Quantise each block of a vector to signs and levels of a scale.

    The scale of a block is its largest magnitude, and there are s = 2**(bits - 1) - 1 levels above
    zero. Values are rounded to the nearest level. With 2 bits they are rounded to one of two
    magnitudes, and there are two scales: the mean of the magnitudes up to the block's mean, and
    that of the others.

    With a ``seed``, this is QSGD (Alistarh et al. 2017), as in SparCML section 6: a magnitude
    between two levels is rounded up with the probability that keeps its mean. The random number of
    an entry depends only on ``seed`` and on ``offset`` + its position, so every machine gets the
    same bits.

    Zeros stay zero, except with two scales. A block with NaN or Inf decodes to NaN.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64 (limited to float32's finite
        numbers, and rounded to float32).
    bits
        2 to 8 bits a value.
    block
        How many consecutive values share a scale.
    seed
        Selects the sequence of random numbers; any integer, modulo 2**64. None: nearest.
    offset
        Position of ``x[0]`` in that sequence, at least 0.
    scale
        The scales' dtype, bfloat16 or float32. In bfloat16 they are rounded to nearest, and with a
        seed up.
    """
    size, levels = x.numel(), 2 ** (bits - 1) - 1
    rows = torch.nn.functional.pad(limited(x, torch.float32), (0, -size % block)).view(-1, block)
    negative = torch.signbit(rows)
    finite = rows.isfinite().all(dim=1)
    if bits == 2 and seed is None:
        steps, level = _two_means(rows.abs(), size)
        scales = _rounded(steps, scale)
    else:
        largest = rows.abs().amax(dim=1)
        scales = _rounded(largest.clamp(max=LARGEST), scale, up=seed is not None)
        if seed is None:
            scales = torch.where(largest < SMALLEST, 0, scales)
            steps = _quotient(torch.full_like(largest, levels), scales.float())
            level = (rows.abs() * steps[:, None] + 0.5).floor()
        else:
            exact = rows.abs() / scales.float()[:, None] * levels
            lower = exact.floor()
            # The comparison with the fraction is exact; adding a random number would round.
            random = uniform(rows.numel(), seed, offset, x.device).view_as(rows)
            level = lower + (random < exact - lower)
        level = torch.where(scales[:, None] > 0, level.clamp(max=levels), 0)
        negative &= level > 0
        scales = scales[:, None]
    scales = torch.where(finite[:, None], scales, torch.nan)
    coded = level.nan_to_num(0).to(torch.uint8) | (negative.to(torch.uint8) << (bits - 1))
    coded = torch.where(finite[:, None], coded, 0)
    codes, scales = _pack(coded.view(-1)[:size], bits), scales.reshape(-1)
    values = dequantize(codes, scales, size, bits, block)
    return Quantized(codes, scales, limited(values, x.dtype))


def dequantize(codes: Tensor, scales: Tensor, size: int, bits: int, block: int) -> Tensor:
    """Turn codes and scales of `quantize` back into values.

    A value is its level times the quotient of the scale and the number of levels.

    Parameters
    ----------
    codes, scales
        As in `Quantized`; with 2 bits, one or two scales a block.
    size
        Length of the vector that was quantised.
    bits, block
        As given to `quantize`.

    Returns
    -------
    Tensor
        float32 ``[size]``.
    """
    levels = 2 ** (bits - 1) - 1
    code = _unpack(codes, bits)[:size]
    places = torch.arange(size, device=codes.device) // block
    if scales.numel() > -(-size // block):
        magnitude = scales.float()[2 * places + (code & 1).long()]
    else:
        steps = _quotient(scales.float(), torch.full_like(scales, levels, dtype=torch.float32))
        magnitude = (code & levels).float() * steps[places]
    return torch.where(code > levels, -magnitude, magnitude)


def limited(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a vector in ``dtype``; finite numbers beyond its range become its largest."""
    if x.dtype == dtype:
        return x
    largest = torch.finfo(dtype).max
    if largest >= torch.finfo(x.dtype).max:
        return x.to(dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(wide.isfinite(), wide.clamp(-largest, largest), wide).to(dtype)


def _quotient(one: Tensor, other: Tensor) -> Tensor:
    """Return the correctly rounded quotients; dividing by a number may take its reciprocal."""
    return one / other


def _two_means(magnitudes: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the two means of each row ``[rows, block]``, and which of them each magnitude gets.

    ``size`` values are not padding. Sums are of float64, by halves, so every machine gets the same.
    """
    rows, block = magnitudes.shape
    lengths = torch.full((rows,), block, dtype=torch.float64, device=magnitudes.device)
    lengths[-1:].fill_(size - (rows - 1) * block)
    wide = magnitudes.double()
    total = _sum_by_halves(wide)
    above = wide > (total / lengths)[:, None]
    count = above.sum(dim=1).double()
    upper = _sum_by_halves(torch.where(above, wide, 0.0))
    means = [(total - upper) / (lengths - count), torch.where(count > 0, upper / count, 0.0)]
    return torch.stack(means, dim=1).float(), above.to(torch.uint8)


def _sum_by_halves(rows: Tensor) -> Tensor:
    """Return the sums of the rows ``[rows, block]``: half is added to half, again and again."""
    width = 1 << max(rows.shape[1] - 1, 0).bit_length()
    rows = torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
    while width > 1:
        width //= 2
        rows = rows[:, :width] + rows[:, width:]
    return rows[:, 0]


def _rounded(scales: Tensor, dtype: torch.dtype, up: bool = False) -> Tensor:
    """Return scales (float32, not negative) in ``dtype``, limited to its finite numbers."""
    if dtype == torch.float32:
        return scales
    bits = scales.view(torch.int32)
    bits = bits + (0xFFFF if up else 0x7FFF + (bits >> 16 & 1))
    return (bits >> 16).clamp(max=0x7F7F).to(torch.int16).view(torch.bfloat16)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes as a stream of bits, the first in the lowest: 8 codes take ``bits`` bytes."""
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % 8)).view(-1, 8).long()
    joined = (rows << torch.arange(0, 8 * bits, bits, device=codes.device)).sum(dim=1)
    shifts = torch.arange(0, 8 * bits, 8, device=codes.device)
    packed = (joined[:, None] >> shifts & 0xFF).to(torch.uint8)
    return packed.view(-1)[: code_bytes(codes.numel(), bits)]


def _unpack(packed: Tensor, bits: int) -> Tensor:
    rows = torch.nn.functional.pad(packed, (0, -packed.numel() % bits)).view(-1, bits).long()
    joined = (rows << torch.arange(0, 8 * bits, 8, device=packed.device)).sum(dim=1)
    shifts = torch.arange(0, 8 * bits, bits, device=packed.device)
    codes: Tensor = joined[:, None] >> shifts & 2**bits - 1
    return codes.to(torch.uint8).view(-1)


_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)

_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

_ROUNDS = 10

_WORD = 0xFFFFFFFF


def uniform(count: int, seed: int, offset: int, device: torch.device) -> Tensor:
    """Return the random numbers ``[offset, offset + count)`` of the sequence given by ``seed``.

    Number j is made of the upper 24 bits of word ``j mod 4`` of the Philox block whose 128-bit
    counter is ``j div 4``.

    Parameters
    ----------
    count
        How many numbers.
    seed
        The 64-bit key; other integers are taken modulo 2**64.
    offset
        Position of the first number, at least 0 and below 2**63 - count.
    device
        The device of the result.

    Returns
    -------
    Tensor
        float32 ``[count]``, in [0, 1).
    """
    first_block = offset // 4
    blocks = torch.arange(first_block, (offset + count + 3) // 4, device=device)
    words = torch.stack(philox(blocks, seed), dim=1).view(-1)
    start = offset - 4 * first_block
    return (words[start : start + count] >> 8).float() * 2.0**-24


def philox(blocks: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words of each block, as int64; the counter's upper half is 0."""
    zero = torch.zeros_like(blocks)
    c0, c1, c2, c3 = blocks & _WORD, blocks >> 32, zero, zero
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 = (key0 + _KEY_STEPS[0]) & _WORD
        key1 = (key1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    # The product of two 32-bit words may wrap in int64, but its 64 bits are right.
    product = a * b
    return (product >> 32) & _WORD, product & _WORD
