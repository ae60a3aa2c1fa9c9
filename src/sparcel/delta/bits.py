"""The bits of elements as integers, and sums that tell versions apart."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel.errors import InputError

_FRACTIONS = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e4m3fnuz: 3,
    torch.float8_e5m2: 2,
    torch.float8_e5m2fnuz: 2,
}

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Layout:
    """What a dtype's bits mean: of floats, the last ``fraction`` ones follow the exponent."""

    dtype: torch.dtype
    floats: bool
    fraction: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def integers(self) -> torch.dtype:
        """The dtype of integers as wide as an element."""
        return _INTEGERS[self.itemsize]

    @property
    def name(self) -> str:
        """The dtype's name, as in ``torch``."""
        return str(self.dtype).removeprefix("torch.")


def layout_of(dtype: torch.dtype) -> Layout:
    """Return the layout of any dtype of one, two, four or eight bytes."""
    if dtype.itemsize not in _INTEGERS:
        raise InputError(f"elements must have 1, 2, 4 or 8 bytes, {dtype} has {dtype.itemsize}")
    return Layout(dtype, dtype in _FRACTIONS, _FRACTIONS.get(dtype, 0))


def layout_named(name: object) -> Layout | None:
    """Return the layout of the dtype with a name, or None if there is no such dtype."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return (
        layout_of(dtype) if isinstance(dtype, torch.dtype) and dtype.itemsize in _INTEGERS else None
    )


def bits_of(elements: Tensor) -> Tensor:
    """Return a tensor's bits as integers, in the same memory."""
    return elements.detach().view(layout_of(elements.dtype).integers)


def key_of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the number (64 bits) that tells a tensor's elements from those of other tensors."""
    what = repr((name, str(dtype), tuple(shape))).encode()
    return int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little")


def stepped(before: Tensor, steps: Tensor, floats: bool) -> Tensor:
    """Return the bits that lie so many units in the last place from others, as integers.

    Floats are counted in the order of their values, in which −0 comes right before 0.
    """
    if not floats:
        return before + steps
    return _reordered(_reordered(before) + steps)


def _reordered(bits: Tensor) -> Tensor:
    """Map bits of floats, read as signed integers, to numbers in the floats' order, or back."""
    lowest = torch.iinfo(bits.dtype).min
    return torch.where(bits < 0, ~bits + lowest, bits)


def hashed(key: int, numbers: Tensor, bits: Tensor) -> int:
    """Return the sum, modulo 2⁶⁴, of what elements with these numbers and bits add to a tensor's.

    It runs on any device; the compiled kernel `_cpu.delta_sum` says the same of whole tensors.
    Source: SplitMix64's finaliser; Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators".
    """
    mask = (1 << 8 * bits.itemsize) - 1
    plain = bits.long() & mask if mask < (1 << 64) - 1 else bits.long()
    x = numbers.long() * signed(0x9E3779B97F4A7C15) + plain * signed(0xD1342543DE82EF95)
    x = x + signed(key)
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return int((x ^ _shifted(x, 31)).sum()) % (1 << 64)


def signed(number: int) -> int:
    """Return the number of 64 bits with a sign that has the bits of a number without one."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right as if numbers had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
