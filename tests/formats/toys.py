"""An index code that sparcel does not contain, to test that nothing depends on a code's layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sparcel.formats import codec
from sparcel.formats.indices import INDEX_CODES
from sparcel.kernels import index_dtype


class Deltas:
    """Writes the distances between indices in 16 bits each, below 65,536 coordinates.

    An index takes two bytes less than in ``"raw"``, so streams turn dense at a higher count.
    """

    def nbytes(self, count: int, size: int) -> int:
        return 2 * count

    def encode(self, indices: Tensor, size: int) -> Tensor:
        assert size < 1 << 16
        deltas = indices.long().diff(prepend=torch.tensor([0]))
        return (deltas - (deltas >> 15 << 16)).to(torch.int16)

    def decode(self, content: Tensor, count: int, size: int) -> Tensor:
        deltas = content.view(torch.int16).long() % (1 << 16)
        return deltas.cumsum(0).to(index_dtype(size))


@contextmanager
def toys() -> Iterator[None]:
    """Know the index code ``"deltas"`` in the block."""
    INDEX_CODES["deltas"] = Deltas()
    try:
        yield
    finally:
        del INDEX_CODES["deltas"]
        codec._format_of.cache_clear()
