"""Memory follows its tensors by name through any layouts of vectors, on the simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import GTopK, Hierarchical, OkTopK, Request, ScaleCom, Scheme, TopK
from sparcel.core.training.layout import Piece
from sparcel.core.training.residuals import Residuals

SIZES = {"a": 7, "b": 1, "c": 30, "d": 16, "e": 3}
Layout = Sequence[Sequence[str]]
"""The parameters of each bucket, in order."""


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    names = draw(st.permutations(sorted(SIZES)))
    cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1))))
    return [names[lo:hi] for lo, hi in zip([0, *cuts], [*cuts, len(names)], strict=True)]


def gradient_of(name: str, rank: int, step: int) -> Tensor:
    """Return small multiples of 4."""
    mixed = torch.arange(SIZES[name]) * (3 + rank) + crc32(name.encode()) % 7 + 5 * step
    return 4.0 * (mixed % 9 - 4)


def bucket_of(names: Sequence[str], gap: int) -> tuple[tuple[Piece, ...], int]:
    """Return the pieces of a bucket with ``gap`` other elements after each, and its size."""
    pieces, start = [], 0
    for name in names:
        pieces.append(Piece(name, start, start + SIZES[name], 0.5 if name == "c" else None))
        start += SIZES[name] + gap
    return tuple(pieces), start


def train(comm: Communicator, scheme: Scheme, steps: Sequence[Layout], gap: int) -> dict[str, Any]:
    """Return by name the gradients that entered the memory, less the updates and the memory."""
    residuals = Residuals(scheme)
    left = {name: torch.zeros(size) for name, size in SIZES.items()}
    for number, layout in enumerate(steps):
        for names in layout:
            pieces, size = bucket_of(names, gap)
            gradient = torch.zeros(size)
            for piece in pieces:
                velocity = residuals.of(piece.name).get("velocity", torch.zeros(1))
                left[piece.name] += 0.5 * velocity + gradient_of(piece.name, comm.rank, number)
                part = gradient_of(piece.name, comm.rank, number)
                gradient[piece.start : piece.stop] = part
            ((vector, _),) = residuals.vectors(pieces, gradient)
            begun = vector.scheme.begin(gradient, comm, Request(vector.layers), in_place=True)
            vector.scheme.commit(begun)
            for piece in pieces:
                left[piece.name] -= gradient[piece.start : piece.stop]
        residuals.steps += 1
    return {name: left[name] - residuals.of(name)["memory"] for name in SIZES}


SCHEMES: dict[str, Scheme] = {
    "topk": TopK(0.1),
    "momentum": OkTopK(0.1, momentum=0.5),
    "two levels": Hierarchical(GTopK(0.1)),
    "momentum on two levels": Hierarchical(ScaleCom(0.1, momentum=0.5)),
    "three levels": Hierarchical(Hierarchical(TopK(0.1, momentum=0.5), 2), 2),
}


@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=settings.default.max_examples // 2)
@given(steps=st.lists(layouts(), min_size=1, max_size=5), gap=st.integers(0, 3))
def test_buckets_may_change_in_every_step(name: str, steps: list[Layout], gap: int) -> None:
    results = simulate(
        4, lambda comm: train(comm, SCHEMES[name], steps, gap), ranks_per_node=2
    ).results
    for parameter in SIZES:
        assert not torch.stack([left[parameter] for left in results]).sum(0).any()
