"""Numbers as people type them: counts, times, rates and shares with units; shares of counts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from sparcel.errors import InputError

Scale = int | Fraction

_THOUSANDS = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12, "p": 10**15}
_COUNTS: dict[str, Scale] = {"": 1, **_THOUSANDS, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SECONDS: dict[str, Scale] = {"us": Fraction(1, 10**6), "ms": Fraction(1, 10**3), "s": 1}
_BYTES: dict[str, Scale] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_BITS_PER_S: dict[str, Scale] = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SHARES: dict[str, Scale] = {"": 1, "%": Fraction(1, 100)}


def share_of(density: float, size: int) -> int:
    """Return ⌈density·n⌉, for a density in [0, 1]: the least count that is this share of ``size``.

    Shares are compared and not multiplied, because a product is rounded: 0.07·100 is above 7.
    """
    if not size:
        return 0
    near = math.ceil(density * size)
    return next(count for count in range(near - 1, near + 2) if count / size >= density)


def whole(text: str) -> int:
    """Read a positive whole number such as ``1000``, ``25.6M``, ``7B`` or ``16Mi``.

    K, M, G (or B), T and P are powers of 1000; Ki, Mi and Gi are powers of 1024.

    Raises
    ------
    InputError
        When the text is not such a number.
    """
    expected = (
        "a count is a positive number such as 1000, 25.6M or 16Mi, with an optional unit: K, M,"
        " G (or B), T or P for powers of 1000, Ki, Mi or Gi for powers of 1024"
    )
    number = _read(text, _COUNTS, expected)
    if not number:
        raise InputError(f"{expected}; got {text!r}")
    if number.denominator != 1:
        raise InputError(f"this count must be a whole number, got {text!r} = {float(number)}")
    return number.numerator


def seconds(text: str) -> float:
    """Read a time such as ``5s``, ``120ms`` or ``50us``.

    Raises
    ------
    InputError
        When the text is not a number with one of these units.
    """
    return float(_read(text, _SECONDS, "a time is a number and us, ms or s, such as 5s"))


def bits_per_s(text: str) -> int:
    """Read a rate such as ``1gbit``, ``2.5gbit`` or ``200mbit`` as bits a second.

    Raises
    ------
    InputError
        When the text is not a number with the unit kbit, mbit or gbit, or is less than 1 bit/s.
    """
    expected = "a rate is a number and kbit, mbit or gbit, such as 1gbit"
    rate = round(_read(text, _BITS_PER_S, expected))
    if not rate:
        raise InputError(f"{expected}, and at least 1 bit/s; got {text!r}")
    return rate


def share(text: str) -> float:
    """Read a share such as ``0.1%`` or ``0.001``.

    Raises
    ------
    InputError
        When the text is not a number, with or without a percent sign.
    """
    return float(_read(text, _SHARES, "a share is a number or a percentage, such as 0.1%"))


def nbytes(text: str) -> int:
    """Read a number of bytes such as ``4 GiB``, ``500 MB`` or ``4096``, rounded to whole bytes.

    kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB are powers of 1024.

    Raises
    ------
    InputError
        When the text is not such a number.
    """
    return round(_read(text, _BYTES, "a size is a number of bytes with a unit, such as 4 GiB"))


def _read(text: str, units: Mapping[str, Scale], expected: str) -> Fraction:
    """Return the exact value of a number and one of ``units``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*|%)", text.strip().lower())
    if match is None or match[2] not in units:
        raise InputError(f"{expected}; got {text!r}")
    return Fraction(match[1]) * units[match[2]]
