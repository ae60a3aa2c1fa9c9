"""How a part of a gradient travels to its owner: the values, then the gradient's tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sparcel import kernels
from sparcel.formats import FewBits
from sparcel.linear.sgd.batches import TAIL
from sparcel.rows.rows import Array


class ExactEncoding:
    """Values as they are."""

    def pack(self, values: Array, tail: Array, step: int, place: int) -> Array:
        """Return the values ``[count, width]`` and the tail ``[TAIL, width]`` as one array."""
        return np.concatenate([values, tail])

    def length(self, count: int) -> int:
        """Return the length of what `pack` returns for so many columns."""
        return count + TAIL

    def unpack(self, parts: Array, counts: Sequence[int]) -> Array:
        """Return what was packed, one part after the other, the values and tail of each.

        ``counts`` are the parts' numbers of columns.
        """
        return parts


class RoundedEncoding:
    """Values in few bits, without bias, and the tail as it is.

    Both ends know how many values travel, so a message has no header.

    Parameters
    ----------
    width
        Number of values a column.
    dtype
        Theirs.
    rounding
        How they are rounded.
    """

    def __init__(self, width: int, dtype: np.dtype[Any], rounding: FewBits) -> None:
        self._width, self._dtype, self._rounding = width, dtype, rounding
        self._tail_bytes = TAIL * width * dtype.itemsize

    def pack(self, values: Array, tail: Array, step: int, place: int) -> Array:
        """Return the bytes of the tail, of the scales and of the values ``[count, width]``.

        ``place`` is that of the first column among those of all ranks: it decides which of the
        step's random numbers round the values.
        """
        by = self._rounding
        written = kernels.quantize(
            torch.from_numpy(values.reshape(-1)),
            by.bits,
            by.block,
            seed=by.seed + (step << 32),
            offset=place * self._width,
            scale=torch.float32,
        )
        parts = (tail.reshape(-1), written.scales.numpy(), written.codes.numpy())
        return np.concatenate([part.view(np.uint8) for part in parts])

    def length(self, count: int) -> int:
        """Return how many bytes `pack` returns for so many columns."""
        return sum(self._lengths(count * self._width))

    def unpack(self, parts: Array, counts: Sequence[int]) -> Array:
        """Return what was packed, as `ExactEncoding.unpack` does."""
        found, end = list[Array](), 0
        for count in counts:
            start, end = end, end + self.length(count)
            found += self._one(parts[start:end], count * self._width)
        return np.concatenate(found).reshape(-1, self._width)

    def _one(self, part: Array, size: int) -> tuple[Array, Array]:
        """Return the ``size`` values and the tail of one part."""
        split = torch.from_numpy(part).split(self._lengths(size))
        tail, *coded = (one.clone() for one in split)  # they begin anywhere; copies are aligned
        values = self._rounding.decode(coded, size, torch.float32)
        return values.numpy().astype(self._dtype), tail.numpy().view(self._dtype)

    def _lengths(self, size: int) -> list[int]:
        """Return the bytes of the tail, of the scales and of so many values."""
        return [self._tail_bytes, *self._rounding.part_bytes(size, 4)]
