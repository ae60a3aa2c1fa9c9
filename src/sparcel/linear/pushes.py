"""How a part of a gradient travels to its owner: the values, then the gradient's tail."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparcel import formats
from sparcel.formats import Qsgd
from sparcel.linear.batches import TAIL
from sparcel.rows.rows import Array
from sparcel.stream import SparseStream
from sparcel.wire import Due


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

    Parameters
    ----------
    width
        Number of values a column.
    dtype
        Theirs.
    quantizer
        What rounds them; each step has random numbers of its own.
    """

    def __init__(self, width: int, dtype: torch.dtype, quantizer: Qsgd) -> None:
        self._width, self._dtype, self._quantizer = width, dtype, quantizer
        self._tail_bytes = TAIL * width * dtype.itemsize

    def pack(self, values: Array, tail: Array, step: int, start: int) -> Tensor:
        """Return the bytes of the values ``[count, width]``, and of the tail.

        ``start`` is the first of this step's random numbers that these values use.
        """
        stream = SparseStream.unchecked(None, torch.from_numpy(values.reshape(-1)), values.size)
        message = self._quantizer.at_step(step).encode(stream, start).message
        return torch.cat([message, torch.from_numpy(tail.reshape(-1)).view(torch.uint8)])

    def most(self, count: int) -> int:
        """Return the most bytes that `pack` returns for so many columns."""
        size = count * self._width
        return self._quantizer.max_bytes(None, size, self._dtype.itemsize) + self._tail_bytes

    def unpack(self, part: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the values, as `pack` rounded them, and the tail."""
        due = Due(count * self._width, self._dtype, None)
        values = formats.decode(part[: -self._tail_bytes], due, self._quantizer).values
        tail = part[-self._tail_bytes :].view(self._dtype)
        return values.view(-1, self._width), tail.view(-1, self._width)
