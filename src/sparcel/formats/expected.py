"""What a rank knows of a stream before it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from sparcel.stream import SparseStream


@dataclass(frozen=True)
class Expected:
    """What a rank knows of a stream before it arrives.

    Attributes
    ----------
    size, dtype, width
        As of the stream.
    max_nnz
        The most entries that it can have; None where nothing bounds them.
    stays_sparse
        Whether the sender keeps it sparse even where the dense form takes fewer bytes.
    """

    size: int
    dtype: torch.dtype
    width: int | None
    max_nnz: int | None = None
    stays_sparse: bool = False

    @classmethod
    def like(
        cls,
        stream: SparseStream,
        max_nnz: int | None = None,
        size: int | None = None,
        stays_sparse: bool = False,
    ) -> Self:
        """Expect a stream like ``stream``, of its size or of ``size``."""
        size = stream.size if size is None else size
        return cls(size, stream.dtype, stream.width, max_nnz, stays_sparse)

    @property
    def value_bytes(self) -> int:
        """Bytes of one coordinate's value, or of its row of values."""
        return self.dtype.itemsize * (1 if self.width is None else self.width)
