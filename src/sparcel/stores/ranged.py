"""Files of which only some bytes are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Lock

_NEAR = 1 << 16
"""Bytes that are read with what is before and after them, rather than asking once more."""
_MOST_READ = 32 << 20
"""Most bytes that are read at once for several spans."""


class Ranged:
    """A file of which only those bytes are read that are asked for, by a slice.

    Several threads may do so at the same time.

    Parameters
    ----------
    size
        Its length.
    read
        Returns the bytes from one to before another one.

    Attributes
    ----------
    bytes
        How many were read.
    """

    _HEAD = 1 << 16
    """Bytes at the beginning that are read at once, because whoever reads a file begins there."""

    def __init__(self, size: int, read: Callable[[int, int], memoryview]) -> None:
        self._size, self._read = size, read
        self._head = read(0, min(size, self._HEAD)) if size else memoryview(b"")
        self.bytes, self._counting = len(self._head), Lock()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        begin, end, _ = part.indices(self._size)
        known = self._head[begin:end]
        first = begin + len(known)
        if first >= end:
            return known
        with self._counting:
            self.bytes += end - first
        rest = self._read(first, end)
        return memoryview(bytearray().join([known, rest])) if known else rest


def near(spans: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield spans of a file that are best read at once, because little is between them."""
    run: list[tuple[int, int]] = []
    for begin, end in spans:
        if run and not (0 <= begin - run[-1][1] <= _NEAR and end - run[0][0] <= _MOST_READ):
            yield run
            run = []
        run.append((begin, end))
    if run:
        yield run
