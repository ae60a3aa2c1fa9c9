"""Sparse gradients in torch's COO form, as embeddings have them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def poisoned(rows: Tensor) -> Tensor:
    """Return a sparse gradient of NaN with the same rows, or with the first if there are none."""
    indices, values = rows.indices(), rows.values()
    if not indices.numel() and rows.shape[0]:
        indices, values = indices.new_zeros(1, 1), values.new_zeros(1, *rows.shape[1:])
    return coalesced(indices[0], torch.full_like(values, math.nan), rows.shape)


def coalesced(indices: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Return the sparse tensor that holds ``rows`` at sorted, unique ``indices``.

    Up to torch 2.12, `torch.sparse_coo_tensor` warns that it checks nothing even if it is told to
    check nothing. The operation that it calls does not warn.
    """
    coalesced: Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        rows.ndim - 1,
        shape,
        indices.long()[None],
        rows,
        dtype=rows.dtype,
        layout=torch.sparse_coo,
        device=rows.device,
        is_coalesced=True,
    )
    return coalesced
