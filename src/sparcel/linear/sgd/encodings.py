"""How a part of a gradient travels to its owner: the values, then the gradient's tail."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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
        size, by = count * self._width, self._rounding
        return self._scales_end(size) + -(-size * by.bits // 8)

    def unpack(self, parts: Array, counts: Sequence[int]) -> Array:
        """Return what was packed, as `ExactEncoding.unpack` does."""
        ends = np.cumsum([0, *map(self.length, counts)])
        packed = [parts[first:last] for first, last in pairwise(ends)]
        return np.concatenate(
            [
                rows
                for part, count in zip(packed, counts, strict=True)
                for rows in self._one(part, count)
            ]
        )

    def _one(self, part: Array, count: int) -> tuple[Array, Array]:
        """Return the values and the tail of one part."""
        size, by = count * self._width, self._rounding
        tail, scales, codes = np.split(part, [self._tail_bytes, self._scales_end(size)])
        values = kernels.dequantize(
            # The parts begin anywhere; copies are aligned.
            torch.from_numpy(codes),
            torch.from_numpy(scales.copy().view(np.float32)),
            size,
            by.bits,
            by.block,
        )
        shape = (-1, self._width)
        return values.numpy().astype(self._dtype).reshape(shape), tail.copy().view(
            self._dtype
        ).reshape(shape)

    def _scales_end(self, size: int) -> int:
        return self._tail_bytes + 4 * -(-size // self._rounding.block)
