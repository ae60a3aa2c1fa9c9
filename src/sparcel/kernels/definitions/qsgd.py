"""Stochastic quantisation of dense vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from sparcel.errors import InputError
from sparcel.kernels.philox import uniform


def quantize(
    x: Tensor, bits: int, bucket: int, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Quantise to sign and level, each bucket scaled by its largest magnitude, unbiased.

    QSGD (Alistarh et al. 2017) with s = 2**(bits - 1) - 1 levels, as in SparCML section 6. A
    magnitude between two levels is rounded up with the probability that keeps its mean. The random
    number of an entry depends only on ``seed`` and on ``offset`` + its position, so every machine
    gets the same bits. A bucket of zeros stays zero. A bucket with NaN or Inf decodes to NaN.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64 (rounded to float32).
    bits
        8, 4 or 2 bits a value.
    bucket
        How many consecutive values share a scale.
    seed
        Selects the sequence of random numbers; any integer, modulo 2**64.
    offset
        Position of ``x[0]`` in that sequence, at least 0.

    Returns
    -------
    packed
        uint8 ``[ceil(n * bits / 8)]``. The first code of a byte takes its lowest bits; the sign is
        the highest bit of a code.
    scales
        float32 ``[ceil(n / bucket)]``.
    """
    check_codes(bits, bucket)
    levels = 2 ** (bits - 1) - 1
    padding = -x.numel() % bucket
    rows = torch.nn.functional.pad(x.float(), (0, padding)).view(-1, bucket)
    scales = rows.abs().amax(dim=1)
    # A bucket with a non-finite entry becomes all NaN, because codes cannot express NaN or Inf.
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    # Comparisons with NaN are false, so a NaN bucket gets codes of 0, like a bucket of zeros.
    shares = torch.where(scales[:, None] > 0, rows.abs() / scales[:, None], 0.0)
    exact = (shares * levels).view(-1)[: x.numel()]
    lower = exact.floor()
    # The comparison with the fraction is exact; adding a random number to `exact` would round.
    level = lower + (uniform(x.numel(), seed, offset, x.device) < exact - lower)
    sign = torch.signbit(x) & (level > 0)
    codes = level.to(torch.uint8) | (sign.to(torch.uint8) << (bits - 1))
    return _pack(codes, bits), scales


def dequantize(packed: Tensor, scales: Tensor, size: int, bits: int, bucket: int) -> Tensor:
    """Turn the codes and scales of `quantize` back into values.

    Parameters
    ----------
    packed, scales
        As returned by `quantize`.
    size
        Length of the vector that was quantised.
    bits, bucket
        As given to `quantize`.

    Returns
    -------
    Tensor
        float32 ``[size]``.

    Raises
    ------
    InputError
        When the lengths of ``packed`` or ``scales`` do not fit ``size``.
    """
    check_lengths(packed, scales, size, bits, bucket)
    levels = 2 ** (bits - 1) - 1
    codes = _unpack(packed, bits)[:size]
    magnitude = (codes & levels).float() / levels
    signed = torch.where(codes > levels, -magnitude, magnitude)
    return torch.mul(signed, scales.repeat_interleave(bucket)[:size])


def check_codes(bits: int, bucket: int) -> None:
    """Raise `InputError` unless there are codes of so many bits, in buckets of such a length."""
    if bits not in (8, 4, 2):
        raise InputError(f"bits must be 8, 4 or 2, got {bits}")
    if bucket < 1:
        raise InputError(f"bucket must be at least 1, got {bucket}")


def check_lengths(packed: Tensor, scales: Tensor, size: int, bits: int, bucket: int) -> None:
    """Raise `InputError` where `dequantize` does."""
    check_codes(bits, bucket)
    expected = -(-size * bits // 8), -(-size // bucket)
    if (packed.numel(), scales.numel()) != expected:
        raise InputError(
            f"{size} values of {bits} bits in buckets of {bucket} need {expected[0]} bytes and "
            f"{expected[1]} scales, got {packed.numel()} and {scales.numel()}"
        )


def _pack(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
    packed = torch.zeros(rows.shape[0], dtype=torch.uint8, device=codes.device)
    for position in range(per_byte):
        packed |= rows[:, position] << (position * bits)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return codes.view(-1)
