"""The largest of each chunk: SparCML's buckets, and ScaleCom's chunk-wise quasi-sort."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel._checks import checked_whole
from sparcel.selectors.ranked import Ranked


@dataclass(eq=False)
class Bucketed(Ranked):
    """The same number of the largest of every ``bucket`` consecutive coordinates.

    Each bucket gives max(1, round(bucket·k/size)) coordinates, or all its nonzeros if it has fewer.
    A vector no longer than a bucket gives min(k, nnz). In a longer vector the total differs from k
    by up to half a coordinate a bucket, because of the rounding; by more if k is below the number
    of buckets, because every bucket gives one. A short last bucket gives as many as a full one.

    Parameters
    ----------
    bucket
        Length of a bucket.
    count
        How many to select of each bucket, whatever k is. None: the rule above.

    Source: SparCML, section 8.3.
    """

    bucket: int = 512
    count: int | None = None

    def __post_init__(self) -> None:
        self.bucket = checked_whole(self.bucket, "bucket", at_least=1)
        if self.count is not None:
            self.count = checked_whole(self.count, "count", at_least=1)

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Round the density to a count a bucket."""
        if self.count is not None:
            return self.count, self.bucket
        density = min(k, size) / max(size, 1)
        return max(1, round(min(self.bucket, size) * density)), self.bucket


@dataclass(eq=False)
class Chunkwise(Ranked):
    """The ``m`` largest of each of about k/m chunks of equal length.

    Chunks have ⌈size/⌊k/m⌋⌉ coordinates, so never more than k are selected. Fewer are selected
    because lengths are whole numbers (by a share of at most density/m: 1 % if k is 1 % of the
    coordinates and m is 1), and because k need not be a multiple of m and the last chunk is short
    (by up to 2·(m−1)). A chunk with fewer than m nonzeros gives fewer.

    Parameters
    ----------
    m
        How many to select of each chunk; if k is less, k of the whole vector.

    Source: ScaleCom, its chunk-wise quasi-sort.
    """

    m: int = 1

    def __post_init__(self) -> None:
        self.m = checked_whole(self.m, "m", at_least=1)

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Choose the shortest chunks that let no more than k through."""
        k = max(1, min(k, size))
        count = min(self.m, k)
        return count, max(1, -(-size // (k // count)))
