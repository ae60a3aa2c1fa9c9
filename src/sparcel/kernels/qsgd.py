"""Stochastic quantisation of dense vectors."""

from __future__ import annotations

from torch import Tensor

from sparcel.errors import InputError
from sparcel.kernels import cpu, reference


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
    _check_bits(bits, bucket)
    if x.is_cpu:
        return cpu.quantize(x, bits, bucket, seed, offset)
    return reference.quantize(x, bits, bucket, seed, offset)


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
    _check_bits(bits, bucket)
    expected = -(-size * bits // 8), -(-size // bucket)
    if (packed.numel(), scales.numel()) != expected:
        raise InputError(
            f"{size} values of {bits} bits in buckets of {bucket} need {expected[0]} bytes and "
            f"{expected[1]} scales, got {packed.numel()} and {scales.numel()}"
        )
    if packed.is_cpu:
        return cpu.dequantize(packed, scales, size, bits, bucket)
    return reference.dequantize(packed, scales, size, bits, bucket)


def _check_bits(bits: int, bucket: int) -> None:
    if bits not in (8, 4, 2):
        raise InputError(f"bits must be 8, 4 or 2, got {bits}")
    if bucket < 1:
        raise InputError(f"bucket must be at least 1, got {bucket}")
