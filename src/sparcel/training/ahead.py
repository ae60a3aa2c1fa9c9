"""Step-ahead: a rank computes its gradient where its own memory is applied already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from sparcel.errors import warn
from sparcel.training.residuals import Residuals

Arrange = Callable[[Tensor, Tensor], Tensor]
"""``(memory, parameter) -> memory in the parameter's shape``."""


_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def in_order(memory: Tensor, parameter: Tensor) -> Tensor:
    """Arrange the memory of gradients that were flattened in logical order."""
    return memory.view(parameter.shape)


class Ahead:
    """Moves parameters to where this rank's memory would bring them, and exactly back.

    What a rank keeps back is missing from the model, so gradients would not see it: they would ask
    for the same change again and again, and the sum of all that overshoots once it is applied.
    Inside ``with ahead:`` each parameter is moved by the step that its optimiser would take with
    the memory as its gradient, without the optimiser's momentum: ``lr·memory`` for SGD, and
    ``lr·(1−β₁)·memory / (√(β₂·v + (1−β₂)·memory²) + ε)``, with Adam's bias corrections, for Adam.
    Nothing is sent for it, and the memory stays as it is, so conservation holds unchanged.

    Parameters
    ----------
    parameters
        The tensors that gradients are computed at, by name.
    residuals
        What is kept back of them.
    arrange
        How memory is laid out.

    Notes
    -----
    Source: Xu, Huo and Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed
    Gradient", AAAI 2021; without their averaging of errors. The rule for Adam is ours.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], residuals: Residuals, arrange: Arrange = in_order
    ) -> None:
        self._parameters, self._residuals, self._arrange = parameters, residuals, arrange
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._rules: dict[str, tuple[torch.optim.Optimizer, int]] = {}
        self._saved: dict[str, Tensor] = {}
        self._moved: list[str] = []

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the parameters that this optimiser updates by its rule, from now on.

        Warns
        -----
        SparcelWarning
            When the rule is none of those above; its parameters then stay in place.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)  # what frameworks wrap
        names = {
            self._names[id(parameter)]: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in self._names
        }
        if isinstance(optimizer, _KNOWN):
            self._rules |= {name: (optimizer, number) for name, number in names.items()}
            return
        for name in names:
            self._rules.pop(name, None)
        if names:
            warn(
                "step-ahead knows how SGD, Adam and AdamW move a parameter, and"
                f" {type(optimizer).__name__} updates {next(iter(names))!r}; gradients are computed"
                " without it, which costs accuracy at low densities"
            )

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimiser updates any of the parameters."""
        return any(
            id(parameter) in self._names
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def __enter__(self) -> Self:
        """See `move`."""
        self.move()
        return self

    def __exit__(self, *_: object) -> None:
        """See `back`."""
        self.back()

    @torch.no_grad()
    def move(self) -> None:
        """Move the parameters, unless they are moved already."""
        if self._moved:
            return
        share = 1.0 - self._residuals.momentum
        for name, (optimizer, number) in self._rules.items():
            memory = self._residuals.of(name).get("memory")
            if memory is None:
                continue
            # Not detach(), which counts changes: a graph that is still needed would refuse them.
            parameter = self._parameters[name].data
            if name not in self._saved:
                self._saved[name] = torch.empty_like(parameter)
            self._saved[name].copy_(parameter)
            self._moved.append(name)
            arranged = self._arrange(memory, parameter)
            state = optimizer.state.get(self._parameters[name], {})
            _advance(parameter, arranged, share, optimizer.param_groups[number], state)

    @torch.no_grad()
    def back(self) -> None:
        """Move the parameters back, unless they are where they belong."""
        for name in self._moved:
            self._parameters[name].data.copy_(self._saved[name])
        self._moved.clear()


def _advance(
    parameter: Tensor,
    memory: Tensor,
    share: float,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
) -> None:
    """Move a parameter in place by the step that its optimiser would take with the memory."""
    lr = float(group["lr"]) * share * (-1 if group.get("maximize") else 1)
    if "betas" not in group:
        parameter.sub_(memory.to(parameter.dtype), alpha=lr)
    elif "exp_avg_sq" in state:
        (beta1, beta2), step = map(float, group["betas"]), float(state["step"]) + 1
        squares = (beta2 * state["exp_avg_sq"]).addcmul_(memory, memory, value=1 - beta2)
        if "max_exp_avg_sq" in state:  # amsgrad
            squares = torch.maximum(squares, state["max_exp_avg_sq"])
        scale = squares.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        rate = lr * (1 - beta1) / (1 - beta1**step)
        parameter.sub_((memory / scale).to(parameter.dtype), alpha=rate)
