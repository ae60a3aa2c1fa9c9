"""Layer-wise adaptive moments: Adam for large batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparcel._checks import checked_number
from sparcel.comm import Group
from sparcel.errors import InputError
from sparcel.optim._layers import Batch, LayerStep, LayerWise, Parameters, ratio
from sparcel.optim.two_steps import adam_two_steps


class LAMB(LayerWise):
    """Adam, whose rate is scaled to each layer: for large batches.

    With parameters w and gradients g of a layer in its step t,
    ``m ← β₁·m + (1−β₁)·g``, ``v ← β₂·v + (1−β₂)·g²``,
    ``u = (m / (1−β₁ᵗ)) / (√(v / (1−β₂ᵗ)) + eps) + weight_decay · w`` and
    ``w ← w − lr · (‖w‖ / ‖u‖) · u``.

    Parameters
    ----------
    params
        Parameters of float dtypes, or groups of them with settings of their own.
    lr
        The learning rate; a scheduler of `torch.optim.lr_scheduler` may change it.
    betas
        β₁ and β₂, in [0, 1).
    eps
        More than 0.
    weight_decay
        At least 0.
    exclude_vectors
        Whether tensors of at most one dimension, that is biases and the scales of norms, get
        neither the ratio ‖w‖ / ‖u‖ nor weight decay.
    foreach, parallel, group
        As of `LARS`. In any case u is held for all parameters.

    Raises
    ------
    InputError
        As `LARS`.

    Notes
    -----
    As of `LARS`; the trust ratio is ‖w‖ / ‖u‖. Norms of the gradients only tell whether these are
    finite; to compute them takes one more pass over the gradients. If an exchange fails, the
    parameters are as before the step; m and v may have changed.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    ICLR 2020, Algorithm 2, with the identity as φ.
    """

    _TOGETHER = ("step", "exp_avg", "exp_avg_sq")
    _plain_two_steps = staticmethod(adam_two_steps)

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        exclude_vectors: bool = True,
        foreach: bool | None = None,
        parallel: bool = False,
        group: Group = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "exclude_vectors": exclude_vectors,
            "foreach": foreach,
        }
        super().__init__(params, defaults, parallel, group)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise InputError(f"betas must be two numbers in [0, 1), got {betas!r}")
        for beta in betas:
            checked_number(beta, "each of betas", at_least=0, below=1)
        checked_number(group["eps"], "eps", above=0)

    def _move(self, batches: Sequence[Batch]) -> None:
        updates = [self._updates(group, layers) for group, layers in batches]
        lengths = iter(self._norms([update for batch in updates for update in batch]))
        for (group, layers), update in zip(batches, updates, strict=True):
            ratios = [ratio(layer.size, next(lengths)) for layer in layers]
            self._remember_ratios(layers, ratios)
            steps = torch._foreach_mul(update, [float(group["lr"]) * one for one in ratios])
            torch._foreach_sub_([layer.parameter for layer in layers], steps)

    def _updates(self, group: Mapping[str, Any], layers: Sequence[LayerStep]) -> list[Tensor]:
        """Average the gradients and their squares, and return u."""
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        gradients = [layer.gradient for layer in layers]
        states = [self._state_of_next_step(layer.parameter) for layer in layers]
        means = [state["exp_avg"] for state in states]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        # In place, torch would round the factor to half precision, and 0.999 to 1 in bfloat16.
        squares = torch._foreach_mul([state["exp_avg_sq"] for state in states], beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        for state, square in zip(states, squares, strict=True):
            state["exp_avg_sq"] = square
        scales = torch._foreach_sqrt(squares)
        torch._foreach_div_(scales, [math.sqrt(1 - beta2 ** one["step"]) for one in states])
        torch._foreach_add_(scales, group["eps"])
        updates = torch._foreach_div(means, scales)
        torch._foreach_div_(updates, [1 - beta1 ** one["step"] for one in states])
        if layers[0].adapted and decay:
            torch._foreach_add_(updates, [layer.parameter for layer in layers], alpha=decay)
        return list(updates)

    def _state_of_next_step(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's state in its next step."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            zeros = torch.zeros_like
            state |= {"step": 0, "exp_avg": zeros(parameter), "exp_avg_sq": zeros(parameter)}
        state["step"] += 1
        return state
