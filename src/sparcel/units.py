"""Numbers as people type them: counts, times and rates with their units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from sparcel.errors import InputError

Scale = int | Fraction

_THOUSANDS = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12, "p": 10**15}
_COUNTS: dict[str, Scale] = {"": 1, **_THOUSANDS, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SECONDS: dict[str, Scale] = {"us": Fraction(1, 10**6), "ms": Fraction(1, 10**3), "s": 1}
_BITS_PER_S: dict[str, Scale] = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def count(text: str) -> float:
    """Read a positive number such as ``1000``, ``25.6M``, ``7B`` or ``16Mi``.

    K, M, G (or B), T and P are powers of 1000, Ki, Mi and Gi powers of 1024, wherever something is
    counted.

    Raises
    ------
    InputError
        When it is no such thing.
    """
    return float(_count(text))


def whole(text: str) -> int:
    """Read a positive whole number, otherwise as `count`."""
    number = _count(text)
    if number.denominator != 1:
        raise InputError(f"a count is a whole number here, got {text!r}, which is {float(number)}")
    return number.numerator


def seconds(text: str) -> float:
    """Read a time such as ``5s``, ``120ms`` or ``50us``.

    Raises
    ------
    InputError
        When it is no number with one of these units.
    """
    return float(_read(text, _SECONDS, "a time is a number and us, ms or s, such as 5s"))


def bits_per_s(text: str) -> int:
    """Read a rate such as ``1gbit``, ``2.5gbit`` or ``200mbit`` as bits a second.

    Raises
    ------
    InputError
        When it is no number with one of the units kbit, mbit and gbit, or less than 1 bit/s.
    """
    told = "a rate is a number and kbit, mbit or gbit, such as 1gbit"
    rate = round(_read(text, _BITS_PER_S, told))
    if not rate:
        raise InputError(f"{told}; got {text!r}, which carries nothing")
    return rate


def _count(text: str) -> Fraction:
    told = (
        "a count is a positive number such as 1000, 25.6M or 16Mi, of K, M, G (or B), T or P,"
        " powers of 1000, or Ki, Mi or Gi, powers of 1024"
    )
    number = _read(text, _COUNTS, told)
    if not number:
        raise InputError(f"{told}; got {text!r}")
    return number


def _read(text: str, units: Mapping[str, Scale], told: str) -> Fraction:
    """Return the exact value of a number and one of ``units``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units:
        raise InputError(f"{told}; got {text!r}")
    return Fraction(match[1]) * units[match[2]]
