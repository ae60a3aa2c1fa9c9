"""Matrices of numpy and scipy as rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparcel.errors import optional
from sparcel.rows import Rows
from sparcel.rows.rows import Array

with optional("sparcel.linear", "linear"):
    import scipy.sparse as sp


def as_rows(matrix: Any) -> Rows:
    """Return a matrix's rows, which share its memory where its types allow that.

    Parameters
    ----------
    matrix
        ``[rows, dimensions]``, an array or a CSR matrix of float32 or float64.
    """
    csr = matrix if sp.issparse(matrix) else sp.csr_matrix(matrix)
    dimensions = int(csr.shape[1])
    index = np.int32 if dimensions <= np.iinfo(np.int32).max else np.int64
    return Rows(
        csr.indptr.astype(np.int64, copy=False),
        csr.indices.astype(index, copy=False),
        csr.data,
        dimensions,
    )


def sample_weights(weights: Any, rows: int, dtype: Any) -> Array | None:
    """Return the weights of rows as an array of a model's dtype; None stays None."""
    if weights is None:
        return None
    with optional("sparcel.linear", "linear"):
        from sklearn.utils.validation import check_array
    found = check_array(
        weights, ensure_2d=False, dtype=dtype, ensure_non_negative=True, input_name="sample_weight"
    )
    if np.ndim(found) == 0:
        return np.full(rows, found, dtype)
    if found.shape != (rows,):
        raise ValueError(f"sample_weight must have one weight a row, {rows}, got {found.shape}")
    return np.ascontiguousarray(found)
