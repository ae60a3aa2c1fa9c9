"""A fixed number of the largest of every chunk: SparCML's buckets, ScaleCom's chunks."""

from __future__ import annotations

from dataclasses import dataclass

from sparcel.selectors.base import check_setting
from sparcel.selectors.ranked import Ranked


@dataclass(eq=False)
class Bucketed(Ranked):
    """The same number of the largest of every ``bucket`` consecutive coordinates.

    Of each bucket max(1, round(bucket·k/size)) are selected, fewer where it has fewer nonzeros. A
    vector no longer than a bucket gives min(k, nnz). On a longer one rounding makes the total
    differ from k: up to by half a coordinate a bucket, and more where k is below the number of
    buckets, since every bucket gives one; a short last bucket gives as many as a full one.

    Parameters
    ----------
    bucket
        Length of a bucket.
    count
        How many to select of each bucket, whatever k is. None: by the rule above.

    Source: SparCML, section 8.3.
    """

    bucket: int = 512
    count: int | None = None

    def __post_init__(self) -> None:
        check_setting("bucket", self.bucket, 1)
        if self.count is not None:
            check_setting("count", self.count, 1)

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Round the density to a count a bucket."""
        if self.count is not None:
            return self.count, self.bucket
        density = min(k, size) / max(size, 1)
        return max(1, round(min(self.bucket, size) * density)), self.bucket


@dataclass(eq=False)
class Chunkwise(Ranked):
    """The ``m`` largest of each of about k/m chunks of equal length.

    Chunks have ⌈size/⌊k/m⌋⌉ coordinates, so never more than k are selected. Since lengths are
    whole, there are fewer by a share of density/m at most (1 % where k is 1 % of the coordinates
    and m is 1), and by 2·(m−1): k may not be a multiple of m, and the last chunk is short. A chunk
    with fewer than m nonzeros gives fewer.

    Parameters
    ----------
    m
        How many to select of each chunk; where k is less, k of the whole vector.

    Source: ScaleCom, its chunk-wise quasi-sort.
    """

    m: int = 1

    def __post_init__(self) -> None:
        check_setting("m", self.m, 1)

    def rule(self, k: int, size: int) -> tuple[int, int | None]:
        """Choose the shortest chunks that let no more than k through."""
        k = max(1, min(k, size))
        count = min(self.m, k)
        return count, max(1, -(-size // (k // count)))
