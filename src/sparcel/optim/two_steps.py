"""How far two steps of an optimiser move a parameter, which step-ahead asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class SaysTwoSteps(Protocol):
    """An optimiser that says itself how far two of its steps move a parameter.

    `LARS` and `LAMB` do.
    """

    def two_steps(
        self, gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[float, Tensor]:
        """Return a rate and a direction, which is subtracted from the parameter.

        The first step has this gradient, and no other gradient ever comes. What a step does by
        itself, such as weight decay or the rest of a velocity, is left out.

        Parameters
        ----------
        gradient
            In the parameter's shape.
        group, state
            The settings of the parameter's group, and its state, empty before its first step.
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
    if "exp_avg_sq" not in state:  # before its first step
        return 0.0, gradient
    (beta1, beta2), step = map(float, group["betas"]), float(state["step"]) + 1
    squares = (beta2 * state["exp_avg_sq"]).addcmul_(gradient, gradient, value=1 - beta2)
    if "max_exp_avg_sq" in state:  # amsgrad
        squares = torch.maximum(squares, state["max_exp_avg_sq"])
    scale = squares.div_(1 - beta2**step).sqrt_().add_(group["eps"])
    return group["lr"] * (1 - beta1**2) / (1 - beta1**step), torch.div(gradient, scale, out=scale)
