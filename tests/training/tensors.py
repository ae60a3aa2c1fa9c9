"""Named tensors, and known gradients for them."""

import torch
from torch import Tensor

Named = dict[str, Tensor]

SHAPES = {
    "first": ((40, 30), torch.float32),
    "bias": ((40,), torch.float32),
    "second": ((30, 50), torch.float64),
    "third": ((1100, 2), torch.float32),
}
TENSORS = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


def gradients_of(rank: int, step: int) -> Named:
    """Return small multiples of 4 that depend on rank, step, name and index."""
    return {
        name: 4
        * ((torch.arange(like.numel()) * (3 + rank) + len(name) + 5 * step) % 9 - 4)
        .view(like.shape)
        .to(like.dtype)
        for name, like in TENSORS.items()
    }
