"""Parsing what others wrote: anything unexpected is a FormatError, and takes little memory."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparcel.errors import FormatError, SparcelError, shown

_WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What Python raises when data have another form than was expected."""
MOST_NESTED = 1 << 17
"""Most lists and objects in a header, and brackets in its names: each takes dozens of bytes."""


@contextmanager
def malformed(what: str, way_out: str = "") -> Iterator[None]:
    """Raise FormatError if the block, which parses something, meets anything unexpected."""
    try:
        yield
    except SparcelError:
        raise
    except (*_WRONG, zlib.error) as error:
        hint = f"; {way_out}" if way_out else ""
        raise FormatError(f"{what}: {shown(repr(error))}{hint}") from None


def nested(text: bytes) -> int:
    """Return how many lists and objects a text may have."""
    return text.count(b"[") + text.count(b"{")


def is_too_nested(text: bytes) -> bool:
    """Tell whether a list of files or tensors has more brackets than `loads` takes.

    A tensor has three in at least 48 bytes, and a file fewer; names may have some more.
    """
    return nested(text) > MOST_NESTED + len(text) // 16


def loads(text: bytes) -> Any:
    """Parse a list of files or tensors, or raise ValueError if it would take too much memory."""
    if is_too_nested(text):
        raise ValueError(f"it has {nested(text)} brackets in {len(text)} bytes")
    return json.loads(text)


def whole(number: object, limit: int = 1 << 63) -> int:
    """Return a whole number below a limit, or raise ValueError."""
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < limit:
        raise ValueError(f"{number!r} is no whole number below {limit}")
    return number
