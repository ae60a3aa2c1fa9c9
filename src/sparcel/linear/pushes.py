"""How a part of a gradient travels to its owner: the values, then the gradient's tail."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparcel import kernels
from sparcel.formats import Qsgd
from sparcel.linear.batches import TAIL
from sparcel.rows.rows import Array


class Exact:
    """Values as they are.

    Parameters
    ----------
    width
        Number of values a column.
    """

    def __init__(self, width: int) -> None:
        self._width = width

    def pack(self, values: Array, tail: Array, step: int, start: int) -> Tensor:
        """Return one vector of the values ``[count, width]`` and the tail."""
        return torch.from_numpy(np.concatenate([values, tail]))

    def most(self, count: int) -> int:
        """Return the length of what `pack` returns for so many columns."""
        return (count + TAIL) * self._width

    def unpack(self, part: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the values and the tail that `pack` packed."""
        rows = part.view(-1, self._width)
        return rows[:-TAIL], rows[-TAIL:]


class Rounded:
    """Values in few bits, without bias, and the tail as it is.

    Both ends know how many values travel, so a message has no header.

    Parameters
    ----------
    width
        Number of values a column.
    dtype
        Theirs.
    quantizer
        Tells how they are rounded.
    """

    def __init__(self, width: int, dtype: torch.dtype, quantizer: Qsgd) -> None:
        self._width, self._dtype, self._quantizer = width, dtype, quantizer
        self._tail_bytes = TAIL * width * dtype.itemsize

    def pack(self, values: Array, tail: Array, step: int, start: int) -> Tensor:
        """Return the bytes of the tail, of the scales and of the values ``[count, width]``.

        ``start`` is the first of this step's random numbers that these values use.
        """
        by = self._quantizer.at_step(step)
        flat = torch.from_numpy(values.reshape(-1))
        codes, scales = kernels.quantize(flat, by.bits, by.bucket, by.seed, start)
        exact = torch.from_numpy(tail.reshape(-1)).view(torch.uint8)
        return torch.cat([exact, scales.view(torch.uint8), codes])

    def most(self, count: int) -> int:
        """Return how many bytes `pack` returns for so many columns."""
        size, by = count * self._width, self._quantizer
        return self._tail_bytes + 4 * -(-size // by.bucket) + -(-size * by.bits // 8)

    def unpack(self, part: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the values, as `pack` rounded them, and the tail."""
        size, by = count * self._width, self._quantizer
        end = self._tail_bytes + 4 * -(-size // by.bucket)
        tail, scales = part[: self._tail_bytes].view(self._dtype), part[self._tail_bytes : end]
        values = kernels.dequantize(
            part[end:], scales.view(torch.float32), size, by.bits, by.bucket
        ).to(self._dtype)
        return values.view(-1, self._width), tail.view(-1, self._width)
