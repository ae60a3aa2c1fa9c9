"""Ranges of a file in memory: writing one whole, and giving one back to the system."""

from __future__ import annotations

import ctypes
import os

_PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of linux/falloc.h."""
_libc = ctypes.CDLL(None, use_errno=True)
if hasattr(_libc, "fallocate"):
    _libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def write(descriptor: int, content: bytes, offset: int) -> None:
    """Write all of the content, which one call of the system may not do."""
    left = memoryview(content)
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count


def free(descriptor: int, start: int, end: int) -> None:
    """Give a range of the file back to the system; it reads as zeros from then on."""
    if end > start and _libc.fallocate(descriptor, _PUNCH_HOLE, start, end - start):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def can_free(descriptor: int) -> bool:
    """Tell whether the system can give back a range of the file; some sandboxes cannot."""
    size = os.fstat(descriptor).st_size
    try:
        free(descriptor, size, size + 1)  # of nothing
    except (OSError, AttributeError):
        return False
    return True
