"""Step-ahead: a rank computes its gradient where its own memory would bring the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from sparcel.errors import warn
from sparcel.optim import SaysTwoSteps, adam_two_steps, sgd_two_steps
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
    Inside ``with ahead:`` each parameter is moved to where its optimiser would bring it in two
    steps if the first one had the memory as its gradient, and no other gradient ever came: by
    ``(1 + momentum)·lr·memory`` for SGD, and for Adam by
    ``(1 − β₁²)·lr·memory / (√(β₂·v + (1−β₂)·memory²) + ε)``, with its bias corrections. Other
    optimisers may have a method `two_steps`, as LARS and LAMB of `sparcel.optim` do, which go as
    far as SGD and Adam times the trust ratio of the layer's last step.
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
    Nesterov momentum, dampening, weight decay and the velocity that is there already are left out.
    Source: Xu, Huo and Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed
    Gradient", AAAI 2021, whose SGD has no momentum; without their averaging of errors. Ours are the
    second step and the rule for Adam. In the long run momentum would move a parameter 1/(1 −
    momentum) times as far as one step does. But a rank's memory is a noisy guess of the mean of all
    ranks' memories, which is what will be applied; docs/experiments.md shows what other distances
    were worth.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], residuals: Residuals, arrange: Arrange = in_order
    ) -> None:
        self._parameters, self._residuals, self._arrange = parameters, residuals, arrange
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._rules: dict[str, tuple[torch.optim.Optimizer, int]] = {}
        self._unknown: dict[str, str] = {}
        """The kinds of optimisers whose rule is not known, each with a parameter."""
        self._places: dict[str, Tensor] = {}
        """Where each parameter's values lie while it is ahead."""
        self._homes: dict[str, Tensor] = {}
        """Where the values of those that are ahead lie otherwise."""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the parameters that this optimiser updates by its rule, from now on.

        Warns
        -----
        SparcelWarning
            When the rule is none of those above, and the optimiser does not say `two_steps`; its
            parameters then stay in place.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)  # what frameworks wrap
        names = self._groups_of(optimizer)
        if isinstance(optimizer, (*_KNOWN, SaysTwoSteps)):
            self._rules |= {name: (optimizer, number) for name, number in names.items()}
            return
        for name in names:
            self._rules.pop(name, None)
            self._unknown.setdefault(type(optimizer).__name__, name)
        self.warn_of_unknown()

    def warn_of_unknown(self) -> None:
        """Warn once of optimisers that `follow` does not know, if there is memory to look at."""
        if not self._residuals.kinds:
            return
        for kind, name in self._unknown.items():
            warn(
                f"step-ahead knows how SGD, Adam, AdamW, LARS and LAMB move a parameter, and {kind}"
                f" updates {name!r}; gradients are computed without it, which costs accuracy at"
                " low densities; a method two_steps, as sparcel.optim.SaysTwoSteps has it,"
                " would tell"
            )
        self._unknown.clear()

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimiser updates any of the parameters."""
        return bool(self._groups_of(optimizer))

    def _groups_of(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """Return the number of the optimiser's group that each parameter is in, by name."""
        return {
            self._names[id(parameter)]: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in self._names
        }

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
        if self._homes:
            return
        corrected = self._residuals.momentum
        for name, (optimizer, number) in self._rules.items():
            memory = self._residuals.of(name).get("memory")
            if memory is None:
                self._places.pop(name, None)  # it may have been flushed
                continue
            parameter = self._parameters[name]
            home, group = parameter.data, optimizer.param_groups[number]
            state = optimizer.state.get(parameter, {})
            memory = self._arrange(memory, home)
            rate, direction = _two_steps(optimizer, memory, corrected, group, state)
            place = self._places.get(name)
            if place is None:
                place = self._places[name] = torch.empty_like(home)
            torch.sub(home, direction.to(home.dtype), alpha=rate, out=place)
            # Values elsewhere, not other values in place: putting them back is free and exact, and
            # a graph that is still needed keeps its own.
            self._homes[name], parameter.data = home, place

    def back(self) -> None:
        """Move the parameters back, unless they are where they belong."""
        for name, home in self._homes.items():
            self._parameters[name].data = home
        self._homes.clear()


def _two_steps(
    optimizer: torch.optim.Optimizer,
    memory: Tensor,
    corrected: float,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
) -> tuple[float, Tensor]:
    """Return how far two steps with this memory go, as a rate and a direction.

    ``corrected`` is the momentum that the scheme corrects, and the optimiser lacks: the memory is
    then a sum of velocities, 1/(1 − momentum) times as long as one of gradients.
    """
    settings = {
        **group,
        "lr": float(group["lr"]) * (1 - corrected) * (-1 if group.get("maximize") else 1),
        "momentum": corrected or group.get("momentum", 0.0),
    }
    if isinstance(optimizer, SaysTwoSteps):
        return optimizer.two_steps(memory, settings, state)
    return (adam_two_steps if "betas" in group else sgd_two_steps)(memory, settings, state)
