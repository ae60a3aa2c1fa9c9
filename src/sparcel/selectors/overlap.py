"""How many coordinates two selections have in common."""

from __future__ import annotations

import torch

from sparcel.stream import SparseStream


def overlap(selection: SparseStream, exact: SparseStream) -> float:
    """Return the share of the coordinates of ``exact`` that are also in ``selection``, in [0, 1].

    Parameters
    ----------
    selection, exact
        Sparse streams of one size. If ``exact`` is empty, the share is 1.
    """
    assert selection.indices is not None and exact.indices is not None, "selections are sparse"
    if exact.nnz == 0:
        return 1.0
    return float(torch.isin(exact.indices, selection.indices).sum()) / exact.nnz
