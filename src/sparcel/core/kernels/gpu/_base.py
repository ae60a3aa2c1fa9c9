"""What kernels of several chapters need: launches, the bits of magnitudes, searches, and counts."""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl

from sparcel.core.kernels.definitions.select import magnitude_bits as bits_in_torch


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run so many programs of a kernel on the device of its first argument, a tensor.

    Its work is queued on the device's current stream. No programs are no work.
    """
    if programs == 0:
        return
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*args, **constants)
    else:
        kernel[(programs,)](*args, **constants)


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


@triton.jit
def load_inside(x, place, size, WHOLE: tl.constexpr):
    """Return entries, 0 beyond the end.

    Where the caller knows that all are ``WHOLE``, inside of the vector, each lane reads several at
    once, whatever the vector's length.
    """
    if WHOLE:
        value = tl.load(x + place)
    else:
        value = tl.load(x + place, mask=place < size, other=0.0)
    return value


@triton.jit
def store_inside(x, place, value, size, WHOLE: tl.constexpr):
    """Write entries, of which those beyond the end have no place; see `load_inside`."""
    if WHOLE:
        tl.store(x + place, value)
    else:
        tl.store(x + place, value, mask=place < size)


BLOCK = 512
"""Entries that one program takes: few, so that what it knows of them stays in registers."""


def programs_for(entries: int) -> int:
    """Return how many programs take so many entries."""
    return -(-entries // BLOCK)


@triton.jit
def lower_bound(numbers, low, high, wanted, steps):
    """Return the first places in ``[low, high)`` whose numbers are not less than ``wanted``.

    Without such a place it is ``high``. A range of n places takes as many steps as n has bits.
    What is not sorted gives wrong places, but none outside of the range.
    """
    for _ in range(steps):
        searching = low < high
        middle = low + (high - low) // 2
        less = tl.load(numbers + middle, mask=searching, other=0) < wanted
        low = tl.where(searching & less, middle + 1, low)
        high = tl.where(searching & (less == 0), middle, high)
    return low


GROUP = 128
"""Spans of a vector, of which a program takes one, that are counted together."""

_KINDS = 4
"""Counts of a group. A selection has those of what passes the threshold (0), of what is above the
k-th largest (1), and of its equals (2); others have one."""


def groups_length(spans: int) -> int:
    """Return how many numbers hold the counts of groups of so many spans."""
    return _KINDS * -(-spans // GROUP)


@triton.jit
def add_span(groups, kind, total, counts, span, count, GROUP: tl.constexpr):
    """Write the count of a span, and add it to that of its group and to the total."""
    tl.store(counts + span, count)
    tl.atomic_add(groups + span // GROUP * 4 + kind, count.to(tl.int64), sem="relaxed")
    tl.atomic_add(total, count.to(tl.int64), sem="relaxed")


@triton.jit
def before_span(groups, kind, counts, span, GROUP: tl.constexpr):
    """Return the sum of the counts of the spans before one."""
    group, number = span // GROUP, tl.arange(0, GROUP)
    sums = tl.zeros((GROUP,), tl.int64)
    for first in range(0, group, GROUP):
        place = first + number
        sums += tl.load(groups + place * 4 + kind, mask=place < group, other=0)
    place = group * GROUP + number
    sums += tl.load(counts + place, mask=place < span, other=0).to(tl.int64)
    return tl.sum(sums, axis=0)
