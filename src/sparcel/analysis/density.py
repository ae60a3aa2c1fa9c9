"""The number of coordinates in a sum if every rank selects independently at random."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left

import torch

from sparcel import kernels
from sparcel._checks import check_type, checked_whole
from sparcel.cost.predict import expected_union, log_absent
from sparcel.errors import InputError
from sparcel.stream import dense_from


def expected_nnz(size: int, k: int, ranks: int) -> float:
    """Return the expected nnz of a sum over ranks that each select k coordinates uniformly.

    A coordinate is absent from the sum if all ranks left it out: n · (1 − (1 − k/n)^P).

    Parameters
    ----------
    size
        n, at least 1.
    k
        Number of coordinates that each rank selects, in [0, n].
    ranks
        P, at least 1; the ranks select independently of each other.

    Returns
    -------
    float
        At least k, the nnz for identical selections, and at most min(P·k, n), that for disjoint
        ones. The relative error is that of a few roundings for any n, k and P.

    Raises
    ------
    InputError
        When an argument is out of its range.

    Notes
    -----
    Among independent ranks with the same distribution, uniform selection fills in fastest, because
    1 − (1 − p)^P is concave in a coordinate's probability p. Real gradients have large values at
    similar coordinates, so their sums have fewer coordinates.

    Source: SparCML, appendix B.1. The paper's alternating sum is the binomial expansion of this
    formula. It is useless in floating point: for P = 100 and k/n = 0.9 its terms reach 10²⁷.
    """
    size, k, ranks = _checked(size, k, ranks)
    return expected_union(size, k, ranks)


def nnz_variance(size: int, k: int, ranks: int) -> float:
    """Return the variance of the nnz whose expectation `expected_nnz` gives.

    Let q be the probability that a coordinate is absent, and q₂ that two are. The variance is
    n·q + n·(n−1)·q₂ − n²·q². It is at most P·k, so the nnz stays within a few √(P·k) of its
    expectation.

    Parameters
    ----------
    size, k, ranks
        As for `expected_nnz`.

    Returns
    -------
    float
        At least 0. The absolute error is about 10⁻¹⁵·P·k; if almost no selections collide, the
        variance may be smaller than that.

    Raises
    ------
    InputError
        When an argument is out of its range.
    """
    size, k, ranks = _checked(size, k, ranks)
    if k in (0, size) or ranks == 1:
        return 0.0
    absent = math.exp(ranks * log_absent(size, k))
    # q₂ = q²·(1 − c)^P: if one coordinate is absent, every other one is more likely to be present.
    c = k / ((size - k) * (size - 1))
    likelier = -math.expm1(ranks * math.log1p(-c)) if c < 1 else 1.0
    spread = expected_union(size, k, ranks) / size - (size - 1) * absent * likelier
    return max(0.0, size * absent * spread)


def delta(size: int, dtype: torch.dtype = torch.float32) -> int:
    """Return δ, the most coordinates with which a sum stays sparse.

    With more coordinates the dense vector takes fewer bytes, because it needs no indices. For
    float32 vectors of fewer than 2³¹ coordinates, δ is half of them.

    Source: SparCML, section 5.1.
    """
    check_type(dtype, torch.dtype, "dtype")
    return dense_from(checked_whole(size, "size", at_least=0), dtype.itemsize) - 1


def ranks_until_dense(size: int, k: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the fewest ranks whose sum is expected to be dense: `expected_nnz` above `delta`.

    Parameters
    ----------
    size, k
        As for `expected_nnz`, but k at least 1.
    dtype
        Of the values.

    Raises
    ------
    InputError
        When an argument is out of its range.
    """
    size, k, _ = _checked(size, k, 1)
    if k == 0:
        raise InputError("k must be at least 1, got 0: an empty sum never turns dense")
    most = delta(size, dtype)
    worlds = range(1, sys.maxsize)
    return worlds[bisect_left(worlds, True, key=lambda ranks: expected_nnz(size, k, ranks) > most)]


def relative_volume(size: int, k: int, ranks: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the expected volume of a sparse all-reduce, divided by that of a dense one.

    The sparse one is ``split_allgather`` with the selections of `expected_nnz`: each rank sends its
    k coordinates to their owners, and then receives the owners' sums, sparse up to `delta` and
    dense above. Once the sum is dense, the volume is at least half of the dense one, however small
    k is. Headers are not counted.

    Parameters
    ----------
    size, k, ranks
        As for `expected_nnz`; ranks at least 2, since one sends nothing.
    dtype
        Of the values.

    Returns
    -------
    float
        In [0, 1].

    Raises
    ------
    InputError
        When an argument is out of its range.

    Source: SparCML, section 5.3.2 and 5.3.3.
    """
    size, k, ranks = _checked(size, k, ranks)
    if ranks < 2:
        raise InputError(f"ranks must be at least 2, got {ranks}: one rank sends nothing")
    check_type(dtype, torch.dtype, "dtype")
    coordinate = 1 + kernels.index_dtype(size).itemsize / dtype.itemsize
    halves = (min(size, nnz * coordinate) for nnz in (k, expected_nnz(size, k, ranks)))
    return sum(halves) / (2 * size)


def _checked(size: int, k: int, ranks: int) -> tuple[int, int, int]:
    size = checked_whole(size, "size", at_least=1)
    k = checked_whole(k, "k", at_least=0, at_most=size)
    return size, k, checked_whole(ranks, "ranks", at_least=1)
