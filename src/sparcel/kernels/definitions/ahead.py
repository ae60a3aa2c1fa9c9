"""Where tensors would be after steps of an optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
