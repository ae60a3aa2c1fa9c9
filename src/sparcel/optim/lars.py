"""Layer-wise adaptive rate scaling: SGD for large batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparcel._checks import checked_number
from sparcel.comm import Group
from sparcel.optim._layers import Batch, LayerWise, Parameters, ratio
from sparcel.optim.two_steps import sgd_two_steps


class LARS(LayerWise):
    """SGD with momentum, whose rate is scaled to each layer: for large batches.

    With parameters w, gradients g and velocity v of a layer,
    ``λ = trust · ‖w‖ / (‖g‖ + weight_decay · ‖w‖)``,
    ``v ← momentum · v + lr · λ · (g + weight_decay · w)`` and ``w ← w − v``.

    Parameters
    ----------
    params
        Parameters of float dtypes, or groups of them with settings of their own.
    lr
        The learning rate; a scheduler of `torch.optim.lr_scheduler` may change it. Large values
        are common, as λ is small.
    momentum
        In [0, 1).
    weight_decay
        At least 0.
    trust
        More than 0: how far a layer may move in a step, as a share of its norm.
    exclude_vectors
        Whether tensors of at most one dimension, that is biases and the scales of norms, get
        neither λ nor weight decay.
    foreach
        Whether a group is changed as a whole, which takes few launches and as much memory as the
        group; otherwise one tensor at a time. None for the former on all devices but the CPU.
    parallel
        Whether the ranks share the computation of the norms: see `sparcel.optim.parallel`. All must
        hold the same parameters and gradients, as after DDP, whose step this is made for; with
        local SGD, or independent runs, results would be wrong.
    group
        The ranks that share it, as of `sparcel.all_reduce`.

    Raises
    ------
    InputError
        For settings out of their range, parameters of other dtypes, and ``group`` without
        ``parallel``.

    Notes
    -----
    Norms are summed up in float64. All else is computed in the parameters' dtype.
    ``optimizer.state[parameter]["trust_ratio"]`` is the λ of the last step, 1 if the layer has
    none or a norm is 0. A copy of the optimiser computes all norms by itself, with the same bits.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017, with
    λ as CommLib has it (equation 11).
    """

    _plain_two_steps = staticmethod(sgd_two_steps)

    def __init__(
        self,
        params: Parameters,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        *,
        exclude_vectors: bool = True,
        foreach: bool | None = None,
        parallel: bool = False,
        group: Group = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "exclude_vectors": exclude_vectors,
            "foreach": foreach,
        }
        super().__init__(params, defaults, parallel, group)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        checked_number(group["momentum"], "momentum", at_least=0, below=1)
        checked_number(group["trust"], "trust", above=0)

    def _move(self, batches: Sequence[Batch]) -> None:
        for group, layers in batches:
            trust, decay = group["trust"], group["weight_decay"]
            ratios = [
                ratio(trust * one.size, one.slope and one.slope + decay * one.size)
                for one in layers
            ]
            self._remember_ratios(layers, ratios)
            parameters = [layer.parameter for layer in layers]
            directions: tuple[Tensor, ...] | list[Tensor] = [layer.gradient for layer in layers]
            if layers[0].adapted and decay:
                directions = torch._foreach_add(directions, parameters, alpha=decay)
            steps = torch._foreach_mul(directions, [float(group["lr"]) * one for one in ratios])
            if group["momentum"]:
                self._add_velocities(parameters, steps, group["momentum"])
            torch._foreach_sub_(parameters, steps)

    def _add_velocities(
        self, parameters: Sequence[Tensor], steps: Sequence[Tensor], momentum: float
    ) -> None:
        """Add the velocities to the steps, which are the velocities then."""
        states = [self.state[parameter] for parameter in parameters]
        pairs = [
            (step, state["momentum_buffer"])
            for step, state in zip(steps, states, strict=True)
            if "momentum_buffer" in state
        ]
        if pairs:
            moving, before = zip(*pairs, strict=True)
            torch._foreach_add_(moving, before, alpha=momentum)
        for step, state in zip(steps, states, strict=True):
            state["momentum_buffer"] = step
