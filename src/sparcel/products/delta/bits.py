"""The bits of elements as integers, and sums that tell versions apart."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparcel.errors import InputError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Layout:
    """What a dtype's bits mean.

    Attributes
    ----------
    dtype, name
        The dtype, and its name in ``torch``.
    safetensors
        Its name in safetensors files, or None: then it cannot be in a store.
    floats, fraction
        Whether elements are floats, and of these, how many bits follow the exponent.
    itemsize, integers
        Bytes of an element, and the dtype of integers as wide.
    """

    dtype: torch.dtype
    name: str
    safetensors: str | None
    floats: bool
    fraction: int
    itemsize: int
    integers: torch.dtype

    @property
    def coded(self) -> tuple[int, bool, int]:
        """What the compiled coder must know of it."""
        return self.itemsize, self.floats, self.fraction


def _layout(dtype: torch.dtype, safetensors: str | None, fraction: int = 0) -> Layout:
    name, size = str(dtype).removeprefix("torch."), dtype.itemsize
    return Layout(dtype, name, safetensors, fraction > 0, fraction, size, _INTEGERS[size])


LAYOUTS = {
    layout.dtype: layout
    for layout in (
        _layout(torch.float64, "F64", 52),
        _layout(torch.float32, "F32", 23),
        _layout(torch.float16, "F16", 10),
        _layout(torch.bfloat16, "BF16", 7),
        _layout(torch.float8_e4m3fn, "F8_E4M3", 3),
        _layout(torch.float8_e4m3fnuz, "F8_E4M3FNUZ", 3),
        _layout(torch.float8_e5m2, "F8_E5M2", 2),
        _layout(torch.float8_e5m2fnuz, "F8_E5M2FNUZ", 2),
        _layout(torch.float8_e8m0fnu, "F8_E8M0"),
        _layout(torch.complex32, None),
        _layout(torch.complex64, "C64"),
        _layout(torch.bool, "BOOL"),
        _layout(torch.uint8, "U8"),
        _layout(torch.int8, "I8"),
        _layout(torch.uint16, "U16"),
        _layout(torch.int16, "I16"),
        _layout(torch.uint32, "U32"),
        _layout(torch.int32, "I32"),
        _layout(torch.uint64, "U64"),
        _layout(torch.int64, "I64"),
    )
}
"""All dtypes that deltas know; others, such as quantized ones, torch cannot read as their bits."""

NAMED = {layout.name: layout for layout in LAYOUTS.values()}
"""The same by their names in torch, which chunks state."""


def layout_of(dtype: torch.dtype) -> Layout:
    """Return the layout of a dtype, or raise InputError."""
    layout = LAYOUTS.get(dtype)
    if layout is None:
        raise InputError(f"deltas do not know {dtype}")
    return layout


def bits_of(elements: Tensor) -> Tensor:
    """Return a tensor's bits as integers, in the same memory."""
    return elements.detach().view(layout_of(elements.dtype).integers)


def planes_of(words: Tensor) -> bytes:
    """Return the lowest bytes of all integers, the next ones of all, and so on."""
    return words.view(torch.uint8).view(len(words), -1).T.contiguous().numpy().tobytes()


def from_planes(planes: bytes, integers: torch.dtype) -> Tensor:
    """Return the integers whose bytes `planes_of` has told."""
    octets = torch.frombuffer(bytearray(planes), dtype=torch.uint8)
    return octets.view(integers.itemsize, -1).T.contiguous().view(integers).view(-1)


@lru_cache(1 << 14)
def key_of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the number (64 bits) that stands for a tensor in sums."""
    what = repr((name, str(dtype), tuple(shape))).encode()
    return int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little")


def stepped(before: Tensor, steps: Tensor, floats: bool, shift: int = 0) -> Tensor:
    """Return the bits, as integers, that lie so many units in the last place from others.

    Floats are counted in the order of their values, in which −0 comes right before 0. The last
    ``shift`` bits of all values are 0, and do not count.
    """
    if not floats:
        return before + (steps << shift)
    return _reordered((_reordered(before) >> shift) + steps << shift) >> shift << shift


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
