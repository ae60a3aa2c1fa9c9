"""The bits of magnitudes, for kernels: integers that order like |x|."""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from sparcel.kernels.definitions.common import magnitude_bits as bits_in_torch


@triton.jit
def magnitude_bits(x):
    """Return the bits of ``|x|``: int64 for float64, else int32."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    elif x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return bits


@triton.jit
def is_infinite(bits):
    """Return whether bits of magnitudes of float32 or float64 are those of Inf or NaN."""
    if bits.dtype == tl.int64:
        infinite = bits >= 0x7FF0000000000000
    else:
        infinite = bits >= 0x7F800000
    return infinite


@triton.jit
def number_of(bits, dtype: tl.constexpr):
    """Return a number of the host, given as `number_bits`, in a dtype."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(dtype)


@triton.jit
def widened(x):
    """Return numbers of 16 bits as float32, others unchanged."""
    if x.dtype.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    return x


def number_bits(number: float) -> int:
    """Return the bits of a float64: Triton takes numbers of the host as float32."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits


def bits_width(dtype: torch.dtype) -> int:
    """Return how many bits a magnitude has."""
    return 8 * dtype.itemsize - 1


def bits_of(magnitude: float, dtype: torch.dtype) -> int:
    """Return the bits of a magnitude that is rounded to ``dtype``; those of NaN are the largest."""
    return int(bits_in_torch(torch.tensor([magnitude], dtype=dtype, device="cpu")))
