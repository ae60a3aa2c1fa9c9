"""Value codes: how a stream's values are written in a message, exactly or in few bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from sparcel.core import kernels
from sparcel.core._checks import checked_flag, checked_whole
from sparcel.errors import FormatError, InputError, checked_name


class Written(NamedTuple):
    """The parts of a message that hold values, and the values that a receiver reads from them."""

    parts: Sequence[Tensor]
    values: Tensor


class ValueCode(ABC):
    """Writes a stream's values; their count and dtype alone decide how many bytes they take.

    Codes that lose something take scalar floats alone. A finite value never becomes infinite.
    """

    number: ClassVar[int]
    """The code's place in `VALUE_CODES`, which a message's header names."""
    loses: ClassVar[bool] = True
    """Whether a receiver may read other values than were written."""
    seed: int = 0
    """What decides random rounding, where there is any."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What stands for the code in a format's name."""

    @property
    def detail(self) -> int:
        """The code's settings, in 24 bits of a message's header."""
        return 0

    @abstractmethod
    def part_bytes(self, count: int, value_bytes: int) -> Sequence[int]:
        """Return the bytes of each part; never fewer for a larger ``count``.

        ``value_bytes`` are those of one value, or row of values, in memory.
        """

    @abstractmethod
    def encode(self, values: Tensor, key: int) -> Written:
        """Write ``values``, contiguous; ``key`` decides random rounding, where there is any."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], count: int, dtype: torch.dtype) -> Tensor:
        """Return ``[count]`` values of ``dtype`` from parts (uint8) of the right lengths."""


@dataclass(frozen=True)
class PlainValues(ValueCode):
    """Values as they are in memory; decoding copies nothing."""

    number: ClassVar[int] = 0
    loses: ClassVar[bool] = False

    @property
    @override
    def name(self) -> str:
        return "plain"

    @override
    def part_bytes(self, count: int, value_bytes: int) -> Sequence[int]:
        return (count * value_bytes,)

    @override
    def encode(self, values: Tensor, key: int) -> Written:
        return Written([values], values)

    @override
    def decode(self, parts: Sequence[Tensor], count: int, dtype: torch.dtype) -> Tensor:
        return parts[0].view(dtype)


_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class HalfValues(ValueCode):
    """Values in 16 bits, rounded to nearest; those beyond the range become its largest number.

    Parameters
    ----------
    dtype
        ``"float16"`` or ``"bfloat16"``.
    """

    dtype: str
    number: ClassVar[int] = 1

    def __post_init__(self) -> None:
        checked_name(self.dtype, _HALVES, "a 16-bit dtype")

    @property
    @override
    def name(self) -> str:
        return self.dtype

    @property
    @override
    def detail(self) -> int:
        return list(_HALVES).index(self.dtype)

    @override
    def part_bytes(self, count: int, value_bytes: int) -> Sequence[int]:
        return (2 * count,)

    @override
    def encode(self, values: Tensor, key: int) -> Written:
        narrow = kernels.limited(values, _HALVES[self.dtype])
        return Written([narrow], kernels.limited(narrow, values.dtype))

    @override
    def decode(self, parts: Sequence[Tensor], count: int, dtype: torch.dtype) -> Tensor:
        return kernels.limited(parts[0].view(_HALVES[self.dtype]), dtype)


_BITS = range(2, 9)
_SCALES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_LONGEST_BLOCK = 1 << 16


@dataclass(frozen=True)
class FewBits(ValueCode):
    """Values in 2 to 8 bits, with a scale for each block of stored values.

    Parameters
    ----------
    bits
        2 to 8 bits a value, sign included. Rounded to nearest, 2 bits have no zero: in a dense
        message zeros become small numbers, where they share a block with others.
    block
        How many consecutive stored values share a scale: a multiple of 8 from 8 to 65536. 0 is 64,
        or 32 with 2 bits.
    scale
        The scales' dtype, ``"bfloat16"`` or ``"float32"``.
    stochastic
        Whether values are rounded at random, without bias, as QSGD does. Otherwise they are rounded
        to nearest, which has a smaller error, and is as good where the error is given back.
    seed
        With ``stochastic``, decides the random numbers, with the step, the rank and the message.

    Raises
    ------
    InputError
        When a setting is not supported.

    Source: `kernels.quantize`. SparCML's code (sections 6 and 8.3) is
    ``FewBits(bits, block=512, scale="float32", stochastic=True)``.
    """

    bits: int
    block: int = 0
    scale: str = "bfloat16"
    stochastic: bool = False
    seed: int = 0
    number: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if checked_whole(self.bits, "bits") not in _BITS:
            raise InputError(f"bits must lie in [2, 8], got {self.bits}")
        block = checked_whole(self.block, "block") or (32 if self.bits == 2 else 64)
        if not 8 <= block <= _LONGEST_BLOCK or block % 8:
            raise InputError(f"block must be a multiple of 8 from 8 to 65536, got {block}")
        object.__setattr__(self, "block", block)
        checked_name(self.scale, _SCALES, "the dtype of a scale")
        checked_flag(self.stochastic, "stochastic")
        checked_whole(self.seed, "seed")

    @property
    @override
    def name(self) -> str:
        return str(self.bits)

    @property
    def detail(self) -> int:
        """See `ValueCode.detail`: bits, two flags, and the block in units of 8."""
        flags = self.stochastic | (self.scale == "float32") << 1
        return self.bits | flags << 4 | (self.block // 8 - 1) << 8

    def part_bytes(self, count: int, value_bytes: int) -> Sequence[int]:
        """See `ValueCode.part_bytes`: those of the scales and of the codes."""
        scales = kernels.scales_count(count, self.bits, self.block, self.stochastic)
        return scales * _SCALES[self.scale].itemsize, kernels.code_bytes(count, self.bits)

    @override
    def encode(self, values: Tensor, key: int) -> Written:
        by = kernels.quantize(
            values,
            self.bits,
            self.block,
            seed=key if self.stochastic else None,
            scale=_SCALES[self.scale],
        )
        return Written([by.scales, by.codes], by.values)

    @override
    def decode(self, parts: Sequence[Tensor], count: int, dtype: torch.dtype) -> Tensor:
        scales, codes = parts
        scales = scales.view(_SCALES[self.scale])
        return kernels.limited(
            kernels.dequantize(codes, scales, count, self.bits, self.block), dtype
        )


def _few_bits(detail: int) -> FewBits:
    bits, flags, block = detail & 15, detail >> 4 & 15, 8 * ((detail >> 8) + 1)
    if flags > 3:
        raise FormatError(f"impossible message: unknown flags {flags} of values in few bits")
    scale = "float32" if flags & 2 else "bfloat16"
    return FewBits(bits, block, scale, stochastic=bool(flags & 1))


def _half(detail: int) -> HalfValues:
    if detail >= len(_HALVES):
        raise FormatError(f"impossible message: there is no 16-bit dtype {detail}")
    return HalfValues(list(_HALVES)[detail])


PLAIN = PlainValues()

VALUE_CODES: list[Callable[[int], ValueCode]] = [lambda _: PLAIN, _half, _few_bits]
"""Makes the code that a message's header names, of its detail; the place is the code's number."""

VALUES_BY_NAME: dict[str, ValueCode] = {
    code.name: code for code in (PLAIN, *map(HalfValues, _HALVES), *map(FewBits, _BITS))
}
"""The value codes that users type, by name."""


def value_code(number: int, detail: int) -> ValueCode:
    """Return the code that a header names.

    Raises
    ------
    FormatError
        When there is no such code.
    """
    if number >= len(VALUE_CODES):
        raise FormatError(f"unknown value code {number}; install the same release on every rank")
    try:
        return VALUE_CODES[number](detail)
    except InputError as error:
        raise FormatError(f"impossible message: {error}") from None
