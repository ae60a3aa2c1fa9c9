"""The optimisers: SGD for updates that are streams; LARS and LAMB for large batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core._checks import check_type, checked_number
from sparcel.core.comm import Group
from sparcel.core.ops import SUM
from sparcel.core.optim._base import (
    Batch,
    ChecksStates,
    LayerStep,
    LayerWise,
    Parameters,
    Tensors,
    ratio,
)
from sparcel.core.optim.two_steps import adam_two_steps, sgd_two_steps
from sparcel.core.stream import SparseStream
from sparcel.errors import InputError


class SGD(ChecksStates):
    """Stochastic gradient descent that touches only the coordinates of its updates.

    Parameters
    ----------
    params
        Contiguous tensors, or groups of them, as for `torch.optim.SGD`.
    lr
        The learning rate; a scheduler of `torch.optim.lr_scheduler` may change it.
    momentum
        As for `torch.optim.SGD`. Unless it is 0, a step touches all coordinates, because all
        velocities shrink in each step.

    Raises
    ------
    InputError
        When ``lr`` is negative, or ``momentum`` is not in [0, 1).

    Notes
    -----
    Parameters change as `torch.optim.SGD` changes them with the same updates as dense gradients:
    with momentum bit by bit, without it up to the rounding of ``lr · update``. States are those of
    `torch.optim.SGD`, too. Do not use ``momentum`` with a scheme that has its own momentum
    correction.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.0) -> None:
        defaults = {"lr": lr, "momentum": momentum}
        self._check_group(defaults)
        super().__init__(params, defaults)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        checked_number(group["lr"], "lr", at_least=0)
        checked_number(group["momentum"], "momentum", at_least=0, below=1)

    @torch.no_grad()
    def step(self, updates: Iterable[SparseStream]) -> None:  # type: ignore[override]
        """Apply an update to each parameter.

        Parameters
        ----------
        updates
            A stream for each parameter, in the order of the parameters, over its elements: what
            `sparcel.schemes.Scheme.step_stream` returns, or its parts from `SparseStream.split`. If
            one of them is not ``finite``, nothing changes.

        Raises
        ------
        InputError
            When the updates do not fit the parameters; nothing changes then.
        """
        groups = [(p, group) for group in self.param_groups for p in group["params"]]
        updates = list(updates)
        expected = [p.numel() for p, _ in groups]
        for update in updates:
            check_type(update, SparseStream, "an update")
        found = [update.size * (update.width or 1) for update in updates]
        if found != expected:
            raise InputError(
                f"step needs a stream for each parameter, of sizes {expected}, got {found};"
                " stream.split(boundaries) cuts the stream of a flat vector into those"
            )
        for (parameter, _), update in zip(groups, updates, strict=True):
            if not parameter.is_contiguous() or parameter.device != update.device:
                raise InputError(
                    f"parameters must be contiguous and where their updates are, got strides"
                    f" {parameter.stride()} on {parameter.device}, an update on {update.device}"
                )
        if not all(update.finite for update in updates):
            return
        for (parameter, group), update in zip(groups, updates, strict=True):
            if group["momentum"]:
                state = self.state[parameter]  # with the names that it has in torch.optim.SGD
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                velocity = state["momentum_buffer"].mul_(group["momentum"])
                _add(velocity, update)
                parameter.add_(velocity, alpha=-group["lr"])
            else:
                _add(parameter, update.scale(-group["lr"]))


def _add(tensor: Tensor, update: SparseStream) -> None:
    """Add an update to a tensor of as many elements, in place."""
    flat = tensor.view(update.size, *update.values.shape[1:])
    if update.indices is None:
        flat.add_(update.values)
    else:
        kernels.scatter_reduce(flat, update.indices, update.values, SUM)


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
        Whether the ranks share the computation of the norms: see `parallel.py`. All must
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
        own = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, own, exclude_vectors, foreach, parallel, group)

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
            parameters = [layer.parameter for layer in layers]
            directions: Tensors = [layer.gradient for layer in layers]
            if layers[0].adapted and decay:
                directions = torch._foreach_add(directions, parameters, alpha=decay)
            steps = self._scaled(directions, group, layers, ratios)
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
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, own, exclude_vectors, foreach, parallel, group)

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
            steps = self._scaled(update, group, layers, ratios)
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
