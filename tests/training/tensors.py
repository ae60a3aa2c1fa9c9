"""Named tensors, known gradients for them, and schemes that average them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparcel.schemes import Auto, Dense, GTopK, Hierarchical, OkTopK, ScaleCom, Scheme, TopK
from sparcel.training import Averager

Named = dict[str, Tensor]

SHAPES = {
    "first": ((40, 30), torch.float32),
    "bias": ((40,), torch.float32),
    "second": ((30, 50), torch.float64),
    "third": ((1100, 2), torch.float32),
}
TENSORS = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
WORDS = {**TENSORS, "words": torch.zeros(60, 4)}
"""With a tensor whose gradient is sparse."""

SCHEMES: dict[str, Callable[[], Scheme]] = {
    "dense": Dense,
    "topk": lambda: TopK(0.05),
    "oktopk": lambda: OkTopK(0.05),
    "filtered": lambda: ScaleCom(0.05, beta=0.5),
    "two levels": lambda: Hierarchical(GTopK(0.1)),
    "auto": lambda: Auto(0.05),
}
schemes = pytest.mark.parametrize("make", SCHEMES.values(), ids=SCHEMES)


def gradients_of(rank: int, step: int) -> Named:
    """Return small multiples of 4 that depend on rank, step, name and index."""
    return {
        name: 4
        * ((torch.arange(like.numel()) * (3 + rank) + len(name) + 5 * step) % 9 - 4)
        .view(like.shape)
        .to(like.dtype)
        for name, like in TENSORS.items()
    }


def rows_of(rank: int, step: int) -> Tensor:
    """Return the sparse gradient of a few looked-up rows; one is looked up twice."""
    rows = torch.tensor([[7, 3 + step, 7, 20 + rank]])
    values = torch.full((4, 4), rank + 1.0)
    return torch.sparse_coo_tensor(rows, values, (60, 4), check_invariants=True)


def owed_by(averager: Averager, rank: int) -> Named:
    """Return what a rank owes, by tensor, flat, in float64."""
    state = averager.state_dict()
    beta = float(state.get("filter", torch.tensor(1.0)))
    prefix = f"rank{rank}."
    return {
        key.removeprefix(prefix): part.double() / beta
        for key, part in state.items()
        if key.startswith(prefix)
    }
