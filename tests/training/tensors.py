"""Named tensors, known gradients for them, and schemes that average them."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import get_args

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from sparcel.core.memory import Range
from sparcel.core.schemes import (
    Auto,
    Bidirectional,
    Dense,
    GTopK,
    Hierarchical,
    OkTopK,
    ScaleCom,
    Scheme,
    TopK,
)
from sparcel.core.training import Averager, Scope

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

Layout = Sequence[Sequence[str]]
"""The tensors of each vector, in order."""

LIKE = {name: tensor.float() for name, tensor in TENSORS.items()}
"""The same tensors with one dtype."""


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    names = draw(st.permutations(sorted(LIKE)))
    cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1))))
    return [names[lo:hi] for lo, hi in pairwise([0, *cuts, len(names)])]


def packed(names: Sequence[str], gradients: Named, gap: int) -> tuple[Tensor, dict[str, Range]]:
    """Return a vector of tensors with ``gap`` zeros behind each, and where they are."""
    starts = accumulate((LIKE[name].numel() + gap for name in names), initial=0)
    places = {
        name: (start, start + LIKE[name].numel())
        for name, start in zip(names, starts, strict=False)
    }
    vector = torch.zeros(sum(LIKE[name].numel() + gap for name in names))
    for name, (start, stop) in places.items():
        vector[start:stop] = gradients[name].flatten()
    return vector, places


def queue_step(averager: Averager, layout: Layout, gradients: Named, gap: int) -> Named:
    """Do a step of vectors that have ``gap`` zeros behind every tensor."""
    updates = {}
    for names in layout:
        vector, places = packed(names, gradients, gap)
        averager.queue(vector, places)
        updates |= {name: vector[start:stop] for name, (start, stop) in places.items()}
    averager.finish()
    return updates


SCOPES: tuple[Scope, ...] = get_args(Scope)

SCHEMES: dict[str, Callable[[], Scheme]] = {
    "dense": Dense,
    "bidirectional": lambda: Bidirectional(0.05),
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
    state = averager.handle.state_dict()
    prefix = f"rank{rank}."
    return {
        key.removeprefix(prefix): part.double()
        for key, part in state.items()
        if key.startswith(prefix)
    }
