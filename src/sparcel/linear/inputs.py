"""What estimators take, as matrices, and matrices as rows."""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import numpy as np

from sparcel._checks import checked_number
from sparcel.comm import Communicator
from sparcel.errors import optional
from sparcel.linear.coordinates import MOST_HELD
from sparcel.linear.model import matrix_of
from sparcel.linear.reading import read
from sparcel.rows import Rows, SvmLight, check
from sparcel.rows.rows import Array

with optional("sparcel.linear", "linear"):
    import scipy.sparse as sp


Data: TypeAlias = Any
"""An array, a sparse matrix, `Rows`, or the path of SVMlight files."""


def opened(data: Data, comm: Communicator | None, dimensions: int | None) -> Data:
    """Return the rows of a path, and anything else as it is.

    Of files each rank reads its own part; all ranks call, and get the same dimensions: those given,
    or what the highest index needs.
    """
    if isinstance(data, str | os.PathLike):
        return read(SvmLight(dimensions), data, comm)
    return data


def as_matrix(data: Data, y: Any = None) -> tuple[Any, Any]:
    """Return what scikit-learn takes: rows as a matrix, with their labels if they have some."""
    if not isinstance(data, Rows):
        return data, y
    check(data)
    return matrix_of(data), data.labels if y is None else y


def as_rows(matrix: Any) -> Rows:
    """Return a matrix's rows, which share its memory where its types and its order allow that.

    Entries of one row and one column become their sum: what coordinate descent squares is a sum.

    Parameters
    ----------
    matrix
        ``[rows, dimensions]``, an array or a CSR matrix of float32 or float64.
    """
    csr = matrix if sp.issparse(matrix) else sp.csr_matrix(matrix)
    if not csr.has_canonical_format:
        csr = csr.copy()
        csr.sum_duplicates()
    dimensions = int(csr.shape[1])
    index = np.int32 if dimensions <= np.iinfo(np.int32).max else np.int64
    return Rows(
        csr.indptr.astype(np.int64, copy=False),
        csr.indices.astype(index, copy=False),
        csr.data,
        dimensions,
    )


def product(matrix: Any, coefficients: Any) -> Array:
    """Return ``matrix @ coefficients.T`` as an array; either may be sparse."""
    if matrix.shape[1] > MOST_HELD:
        # scipy would take memory for each column.
        columns, places = np.unique(coefficients.indices, return_inverse=True)
        shape = coefficients.shape[0], len(columns)
        coefficients = sp.csr_matrix((coefficients.data, places, coefficients.indptr), shape)
        matrix = matrix_of(as_rows(matrix).among(columns))
    scores = matrix @ coefficients.T
    found: Array = scores.toarray() if sp.issparse(scores) else scores
    return found


def sample_weights(weights: Any, rows: int, dtype: Any) -> Array | None:
    """Return the weights of rows as an array of a model's dtype; None stays None."""
    if weights is None:
        return None
    with optional("sparcel.linear", "linear"):
        from sklearn.utils.validation import check_array
    if np.isscalar(weights) or getattr(weights, "ndim", 1) == 0:
        weights = np.full(rows, checked_number(weights, "sample_weight", at_least=0))
    if rows == 0 and np.size(weights) == 0:  # which check_array refuses
        return np.zeros(0, dtype)
    found = check_array(
        weights, ensure_2d=False, dtype=dtype, ensure_non_negative=True, input_name="sample_weight"
    )
    if found.shape != (rows,):
        raise ValueError(f"sample_weight must have one weight a row, {rows}, got {found.shape}")
    return np.ascontiguousarray(found)
