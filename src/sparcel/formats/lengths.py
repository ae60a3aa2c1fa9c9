"""How long messages are: what communicators are told, and what the cost model counts."""

from __future__ import annotations

from typing import NamedTuple

from sparcel.formats.format import Format


class Lengths(NamedTuple):
    """The lengths of messages of one kind of stream; counts may be fractions, as expected ones are.

    Attributes
    ----------
    size
        Coordinates of a stream, where a method is not told of another number.
    value_bytes
        Of a coordinate's value, or row of values, in memory.
    """

    format: Format
    size: int
    value_bytes: int

    def message(self, nnz: float, size: int | None = None) -> float:
        """Return the bytes of a message of ``nnz`` of ``size`` coordinates, sparse or dense."""
        dense = self.is_dense(nnz, size)
        return self.dense_message(size) if dense else self.sparse_message(nnz, size)

    def region_message(self, nnz: float, size: int) -> int:
        """Return the bytes of the message of a region of a sum: see `Format.for_region`."""
        format = self.format.for_region(round(nnz), size, self.value_bytes)
        if format is None:
            return self.dense_message(size)
        return format.nbytes(nnz, size, self.value_bytes)

    def sparse_message(self, nnz: float, size: int | None = None) -> int:
        """Return the bytes of a message of ``nnz`` of ``size`` coordinates that stays sparse."""
        return self.format.nbytes(nnz, self.size if size is None else size, self.value_bytes)

    def dense_message(self, size: int | None = None) -> int:
        """Return the bytes of a message of all of ``size`` coordinates, without indices."""
        return self.format.nbytes(None, self.size if size is None else size, self.value_bytes)

    def most_bytes(self, nnz: float | None, size: int | None = None) -> int:
        """Return the most bytes of a message of up to ``nnz`` coordinates, also of a region.

        ``nnz`` None bounds nothing.
        """
        size = self.size if size is None else size
        dense_from = self.format.dense_from(size, self.value_bytes)
        if nnz is not None and nnz < dense_from:
            return self.sparse_message(int(nnz), size)
        all_but_one = size - 1 if nnz is None else min(int(nnz), size - 1)
        return max(
            self.dense_message(size),
            self.sparse_message(min(dense_from - 1, size), size),
            self.region_message(max(all_but_one, 0), size),
        )

    def is_dense(self, nnz: float, size: int | None = None) -> bool:
        """Tell whether so many coordinates travel dense."""
        size = self.size if size is None else size
        return nnz >= self.format.dense_from(size, self.value_bytes)
