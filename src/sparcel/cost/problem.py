"""What is to be summed: sizes, counts and how much the ranks' indices overlap."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from sparcel.errors import InputError
from sparcel.formats.header import HEADER_BYTES, padded

_INT32_SIZES = 1 << 31


@dataclass(frozen=True)
class Problem:
    """A sum over ranks, as far as its cost depends on it.

    Parameters
    ----------
    size, k
        Coordinates of the vector, and how many of them every rank sends.
    ranks, ranks_per_node
        How many ranks there are; consecutive ones share a node.
    itemsize
        Bytes of a value.
    spread
        Coordinates among which the ranks' indices lie, evenly and independently: the whole vector
        where it is None, ``k`` where all ranks have the same indices.
    clusters
        Into how many windows these coordinates fall, at random places; 0 where they lie evenly
        over the vector.
    """

    size: int
    k: int
    ranks: int
    ranks_per_node: int = 1
    itemsize: int = 4
    spread: int | None = None
    clusters: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "k", "ranks", "ranks_per_node", "itemsize"):
            if (given := getattr(self, name)) < 1:
                raise InputError(f"{name} must be at least 1, got {given}")
        if not self.k <= self.size:
            raise InputError(f"k must be at most the size, {self.size}, got {self.k}")
        if self.spread is not None and not self.k <= self.spread <= self.size:
            raise InputError(
                f"spread must lie between k, {self.k}, and the size, {self.size}, got {self.spread}"
            )

    @property
    def entry_bytes(self) -> int:
        """Bytes of a coordinate on the wire: its value and its index."""
        return self.itemsize + (4 if self.size < _INT32_SIZES else 8)

    def union(self, streams: float) -> float:
        """Return the coordinates that the sum of so many ranks' streams is expected to have.

        Source: SparCML, section 3.1: n(1 − (1 − k/n)^m) of m streams of uniform indices.
        """
        spread = self.spread or self.size
        hit: float = 1 - (1 - self.k / spread) ** streams
        return spread * hit

    def message(self, nnz: float, size: float | None = None) -> float:
        """Return the bytes of a message of ``nnz`` of ``size`` coordinates, sparse or dense."""
        size = self.size if size is None else size
        dense = size * self.itemsize
        body = dense if self.is_dense(nnz, size) else nnz * self.entry_bytes
        return HEADER_BYTES + padded(round(body))

    def is_dense(self, nnz: float, size: float | None = None) -> bool:
        """Tell whether so many coordinates take more bytes sparse than dense."""
        size = self.size if size is None else size
        return nnz * self.entry_bytes > size * self.itemsize

    def crowded_share(self, regions: int) -> float:
        """Return the share of the indices that the fullest of so many equal regions holds."""
        return _fullest(self.clusters, regions) if self.clusters else 1 / regions


@lru_cache(maxsize=256)
def _fullest(clusters: int, regions: int) -> float:
    """Return the expected share of the fullest region, for clusters at random places."""
    draws, generator = 200, random.Random(0)
    fullest = 0
    for _ in range(draws):
        counts = [0] * regions
        for _ in range(clusters):
            counts[generator.randrange(regions)] += 1
        fullest += max(counts)
    return fullest / (draws * clusters)
