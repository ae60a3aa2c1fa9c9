"""How far two steps of an optimiser move a parameter, which step-ahead asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparcel.core import kernels


@runtime_checkable
class SaysTwoSteps(Protocol):
    """An optimiser that says itself how far two of its steps move a parameter.

    `LARS` and `LAMB` do.
    """

    def two_steps(
        self, gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[float, Tensor]:
        """Return a rate and a direction, which is subtracted from the parameter.

        The first of the steps has this gradient, and the second has none. What steps do without a
        gradient, such as weight decay or the rest of a velocity, is left out.

        Parameters
        ----------
        gradient
            In the parameter's shape.
        group, state
            The settings of the parameter's group, and its state, empty before its first step. The
            group's ``"shape"`` is the whole parameter's, of which FSDP gives shards.
        """


def sgd_two_steps(
    gradient: Tensor, group: Mapping[str, Any], _: Mapping[str, Any]
) -> tuple[float, Tensor]:
    """Return the rate and the direction of SGD with momentum, as `SaysTwoSteps` has them."""
    return group["lr"] * (1 + group["momentum"]), gradient


def adam_two_steps(
    gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[float, Tensor]:
    """Return the rate and the direction of Adam, as `SaysTwoSteps` has them."""
    move = adam_move(gradient, group, state)
    if isinstance(move, kernels.Along):
        return move.rate, move.direction
    return move.rate, kernels.scaled_as_adam(gradient, move.scale)


def adam_move(
    gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
) -> kernels.Along | kernels.AsAdam:
    """Return how two steps of Adam move a parameter, in a way that takes one pass."""
    if "exp_avg_sq" not in state:  # before its first step
        return kernels.Along(gradient, 0.0)
    (beta1, beta2), step = map(float, group["betas"]), float(state["step"]) + 1
    squares, largest = state["exp_avg_sq"], state.get("max_exp_avg_sq")  # the latter with amsgrad
    scale = kernels.AdamScale(squares, beta2, 1 - beta2**step, float(group["eps"]), largest)
    return kernels.AsAdam(gradient, scale, group["lr"] * (1 - beta1**2) / (1 - beta1**step))


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser that a framework has wrapped, or the optimiser itself."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimiser is Muon, by its class's name: of torch, or of another library."""
    return any("muon" in kind.__name__.lower() for kind in type(unwrapped(optimizer)).__mro__)


def muon_two_steps(
    gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[float, Tensor]:
    """Return a rate and a direction for Muon, as `SaysTwoSteps` has them.

    Muon's update has singular values of about 1, whatever its momentum's length. So a gradient
    changes an update by about the same share as the momentum. The direction is the gradient itself,
    because making it orthogonal would take as long as Muon's own step.
    """
    if "momentum_buffer" not in state:  # before its first step
        return 0.0, gradient
    beta, (rows, columns) = group["momentum"], group["shape"]
    momentum, own = (
        torch.linalg.vector_norm(one, dtype=gradient.dtype) / math.sqrt(max(one.numel(), 1))
        for one in (state["momentum_buffer"], gradient)
    )
    length = torch.hypot(beta * momentum, (1 - beta) * own).clamp_(min=group["eps"])
    # The root mean square of an update's elements, where its singular values are 1.
    unit = 1 / math.sqrt(max(rows, columns))
    adjusted = (
        0.2 / unit if group["adjust_lr_fn"] == "match_rms_adamw" else max(1, rows / columns) ** 0.5
    )
    rate = group["lr"] * adjusted * (1 - beta**2) * unit
    if gradient.device.type == "cpu":
        return rate / float(length), gradient
    return rate, gradient / length  # without waiting for the device
