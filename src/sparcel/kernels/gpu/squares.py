"""Sums of squares on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sums_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of each vector; torch takes many in one launch.

    Every run has the same bits, but vectors that were cut need not have those of the whole.
    """
    kinds = [(vector.dtype, vector.device) for vector in vectors]
    norms = [vectors[0]] * len(vectors)
    for kind in dict.fromkeys(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        own = [vectors[place].detach() for place in places]
        found = torch._foreach_norm(own, 2, dtype=torch.float64)
        for place, norm in zip(places, found, strict=True):
            norms[place] = norm.to(vectors[0].device)
    return torch.stack(norms).square_()
