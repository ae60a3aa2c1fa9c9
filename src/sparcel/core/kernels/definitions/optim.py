"""What optimisers need of tensors: sums of squares, and where a step would move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel.core import device

CHUNK = 1 << 17
"""Entries of a vector whose squares are summed by themselves."""


def sums_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of each vector, summed up in float64.

    On the CPU the sums depend neither on the number of threads nor on the instruction set, and on
    a GPU every run gives the same. That of a vector is the sum of those of its chunks, one after
    another, so whoever cuts vectors at multiples of `kernels.CHUNK` gets the same bits.

    Parameters
    ----------
    vectors
        Vectors of any length, each of any float dtype, all on one device for few launches.

    Returns
    -------
    Tensor
        float64 ``[len(vectors)]``, on the device of the first vector.
    """
    # The norms of chunks take few launches on a GPU.
    chunks = [chunk for vector in vectors for chunk in vector.detach().split(CHUNK)]
    owners = [place for place, vector in enumerate(vectors) for _ in vector.split(CHUNK)]
    kinds = [(chunk.dtype, chunk.device) for chunk in chunks]
    squares = torch.zeros(len(chunks), dtype=torch.float64, device="cpu")
    for kind in dict.fromkeys(kinds):  # those of other kinds in a call may change how torch sums
        own = [place for place, other in enumerate(kinds) if other == kind]
        norms = torch._foreach_norm([chunks[place] for place in own], 2, dtype=torch.float64)
        squares[own] = device.read(torch.stack(norms).square_())
    sums = torch.zeros(len(vectors), dtype=torch.float64, device="cpu")
    places = torch.tensor(owners, dtype=torch.int64, device="cpu")
    sums.index_add_(0, places, squares)  # one by one on the CPU
    return device.put(sums, vectors[0].device, sums.dtype) if vectors else sums


@dataclass(frozen=True)
class Along:
    """A move by ``-rate · direction``.

    ``direction`` has the shape of the tensor that moves, to whose dtype it is converted.
    """

    direction: Tensor
    rate: float


@dataclass(frozen=True)
class AdamScale:
    """How Adam scales a gradient g: by ``1 / (√(max(beta·v + (1 − beta)·g², M) / bias) + eps)``.

    Parameters
    ----------
    squares
        v, the mean of squared gradients, in the gradient's shape.
    beta, bias, eps
        β₂, the bias 1 − β₂ᵗ of step t, and what keeps the quotient finite.
    largest
        M, with amsgrad; None for 0.
    """

    squares: Tensor
    beta: float
    bias: float
    eps: float
    largest: Tensor | None = None


@dataclass(frozen=True)
class AsAdam:
    """A move by ``-rate`` times a gradient, in the shape of what moves, that Adam has scaled."""

    gradient: Tensor
    scale: AdamScale
    rate: float


def scaled_as_adam(gradient: Tensor, scale: AdamScale) -> Tensor:
    """Return a gradient that Adam has scaled."""
    squares = (scale.beta * scale.squares).addcmul_(gradient, gradient, value=1 - scale.beta)
    if scale.largest is not None:
        squares = torch.where(scale.largest > squares, scale.largest, squares)
    root = squares.div_(scale.bias).sqrt_().add_(scale.eps)
    return torch.div(gradient, root, out=root)


def moved(tensors: Sequence[Tensor], moves: Sequence[Along | AsAdam]) -> list[Tensor]:
    """Return the values of tensors once they have moved, as new tensors without gradients.

    The compiled kernel takes float32 tensors that fill memory in the order in which their moves'
    do. Its numbers differ from these in their last bits, and depend neither on the number of
    threads nor on the instruction set.

    Parameters
    ----------
    tensors
        Of any shapes and float dtypes.
    moves
        One for each of them.
    """
    return [_moved(one.detach(), move) for one, move in zip(tensors, moves, strict=True)]


def _moved(values: Tensor, move: Along | AsAdam) -> Tensor:
    if isinstance(move, AsAdam):
        direction = scaled_as_adam(move.gradient.detach(), move.scale)
    else:
        direction = move.direction.detach()
    return torch.sub(values, direction.to(values.dtype), alpha=move.rate)
