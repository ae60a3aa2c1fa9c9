"""The expected number of coordinates in a sum of uniformly random selections."""

from __future__ import annotations

import math
from collections.abc import Sequence


def expected_union(size: int, k: int, streams: float) -> float:
    """Return n · (1 − (1 − k/n)^m): the nnz of the sum of m streams of k of n coordinates each.

    k lies in [0, n], n is at least 1. The relative error is that of a few roundings for any n, k
    and m.

    Source: SparCML, section 3.1 and appendix B.1.
    """
    return float(size) if k == size else -size * math.expm1(streams * log_absent(size, k))


def expected_union_of(size: int, counts: Sequence[int]) -> float:
    """Return the expected nnz of a sum in which stream i has ``counts[i]`` coordinates."""
    if max(counts, default=0) == size:
        return float(size)
    return -size * math.expm1(math.fsum(log_absent(size, count) for count in counts))


def log_absent(size: int, k: int) -> float:
    """Return log(1 − k/n), for k < n, without losing digits at either end."""
    return math.log1p(-k / size) if 2 * k < size else math.log((size - k) / size)
