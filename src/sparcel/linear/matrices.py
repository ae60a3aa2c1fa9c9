"""Rows as matrices of scipy."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparcel.errors import optional
from sparcel.rows import Rows


def matrix_of(rows: Rows) -> Any:
    """Return rows as a CSR matrix that shares their memory where its types allow that.

    scipy's constructor copies arrays that are small parts of others, as those of a shard are.
    """
    with optional("sparcel.linear", "linear"):
        import scipy.sparse as sp
    matrix = sp.csr_matrix((len(rows), rows.dimensions), dtype=rows.values.dtype)
    index = np.int32 if max(rows.nnz, rows.dimensions) <= np.iinfo(np.int32).max else np.int64
    matrix.indptr = rows.offsets.astype(index, copy=False)
    matrix.indices = rows.columns.astype(index, copy=False)
    matrix.data = rows.values
    return matrix
