"""Step-ahead: a rank computes its gradient where its own memory would bring the parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparcel.core import kernels
from sparcel.core.optim import SaysTwoSteps, is_muon
from sparcel.core.optim.two_steps import adam_move, muon_two_steps, sgd_two_steps, unwrapped
from sparcel.core.schemes import suits_muon
from sparcel.core.training.residuals import Residuals
from sparcel.errors import warn_on_rank_0

Arrange = Callable[[Tensor, Tensor], Tensor]
"""``(memory, parameter) -> memory in the parameter's shape``."""

Move = kernels.Along | kernels.AsAdam
"""How a parameter moves."""

Rule = Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], Move]
"""``(gradient, group, state) -> move``, of arguments as `SaysTwoSteps.two_steps` has them."""


def in_order(memory: Tensor, parameter: Tensor) -> Tensor:
    """Arrange the memory of gradients that were flattened in logical order."""
    return memory.view(parameter.shape)


class Ahead:
    """Tells where this rank's memory would bring the parameters, which stay where they are.

    What a rank keeps back is missing from the model, so gradients would not see it: they would ask
    for the same change again and again, and the sum of all that overshoots once it is applied.
    So compute gradients with the values that `moved` returns. These are where the optimiser would
    bring each parameter in two steps if the first one had the memory as its gradient, and no other
    gradient ever came: the parameter less ``(1 + momentum)·lr·memory`` for SGD, and for Adam less
    ``(1 − β₁²)·lr·memory / (√(β₂·v + (1−β₂)·memory²) + ε)``, with its bias corrections. For
    Muon it is as much of an update's length as the memory would have of the momentum's. Other
    optimisers may have a method `two_steps`, as LARS and LAMB of `sparcel.optim` do, which go as
    far as SGD and Adam times the trust ratio of the layer's last step.
    Nothing is sent for it, and the memory stays as it is, so conservation holds unchanged.

    Parameters
    ----------
    parameters
        The tensors that gradients are computed at, by name, which may become others. Of DTensors,
        this rank's shards move.
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
    ranks' memories, which is what will be applied; docs/explanation/why.md shows what other
    distances were worth.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], residuals: Residuals, arrange: Arrange = in_order
    ) -> None:
        self.parameters, self.names = parameters, frozenset(parameters)
        self._residuals, self._arrange = residuals, arrange
        self._owners: dict[int, tuple[Optimizer, Mapping[str, Any]]] = {}
        """The optimiser that updates a parameter, and its group there, by the parameter's id."""
        self._sizes: list[tuple[int, int]] = []
        """The groups in which these were found, by their ids, and how many parameters they had."""
        self._rules: dict[Optimizer, Rule] = {}
        """The optimisers whose rule is known, each with its rule."""
        self._staying: set[str] = set()
        """The parameters of optimisers whose rule is not known."""
        self._unknown: dict[str, str] = {}
        """Unknown kinds of optimisers that nobody was warned of yet, each with a parameter."""

    @property
    def steps(self) -> int:
        """How many steps there were; until the next one, moved values are the same."""
        return self._residuals.steps

    def follow(self, optimizer: Optimizer) -> None:
        """Move the parameters that this optimiser updates by its rule, from now on.

        Warns
        -----
        SparcelWarning
            When the rule is none of those above, and the optimiser does not say `two_steps`; its
            parameters are then not moved. For Muon, if the scheme is not what is recommended there.
        """
        optimizer = unwrapped(optimizer)
        names = self._names_of(optimizer)
        if not names:
            return
        if is_muon(optimizer) and not suits_muon(self._residuals.template):
            warn_on_rank_0(
                f"Muon updates {names[0]!r}, and loses accuracy where ranks send a part of their"
                " gradients, or few bits of them; without a scheme's name attach(model,"
                " optimizer=[muon, adamw]) sends all, in 8 bits"
            )
        rule = _rule_of(optimizer)
        if rule is None:
            self._staying.update(names)
            self._unknown.setdefault(type(optimizer).__name__, names[0])
            self.warn_of_unknown()
            return
        self._rules[optimizer] = rule
        self._staying.difference_update(names)

    def moves_by(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimiser updates parameters that may be moved."""
        return bool(self._names_of(optimizer))

    def _names_of(self, optimizer: Optimizer) -> list[str]:
        own = {id(parameter): name for name, parameter in self.parameters.items()}
        updated = (one for group in optimizer.param_groups for one in group["params"])
        return [own[id(one)] for one in updated if id(one) in own]

    def warn_of_unknown(self) -> None:
        """Warn once of optimisers that `follow` does not know, if there is memory to look at."""
        if not self._residuals.kinds:
            return
        for kind, name in self._unknown.items():
            warn_on_rank_0(
                f"step-ahead knows how SGD, Adam, AdamW, Muon, LARS and LAMB move a parameter, and"
                f" {kind} updates {name!r}; gradients are computed without it, which costs"
                " accuracy at low densities; a method two_steps, as sparcel.optim.SaysTwoSteps has"
                " it, would tell"
            )
        self._unknown.clear()

    def moved(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the moved values of these parameters, or of all; the parameters stay as they are.

        Compute with them what the gradients are taken of, for example by
        ``torch.func.functional_call(model, ahead.moved(), inputs)``. Gradients reach the parameters
        as if those had been used.

        Returns
        -------
        dict
            New tensors by name, like the parameters. Before there is memory, and before the
            parameter's optimiser is known, these are copies, so that torch.compile finds tensors of
            one class in each step. Parameters of an optimiser that `follow` does not know are left
            out, and all if memory holds nothing, or no more than roundings.
        """
        found = self.values(names)
        if not torch.is_grad_enabled():
            return found
        return {name: _like(_local(self.parameters[name]), one) for name, one in found.items()}

    def values(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return what `moved` returns, but tensors that no gradients flow through."""
        if not self._residuals.waits:
            return {}
        self._find_owners()
        names = self.parameters if names is None else names
        here: dict[str, Tensor] = {
            name: _local(self.parameters[name]) for name in names if name not in self._staying
        }
        moves = {name: self._move(name, values) for name, values in here.items()}
        moving = {name: move for name, move in moves.items() if move is not None}
        moved = kernels.moved([here[name] for name in moving], list(moving.values()))
        copies = {name: here[name].detach().clone() for name, move in moves.items() if move is None}
        return copies | dict(zip(moving, moved, strict=True))

    def _find_owners(self) -> None:
        """Find which optimiser updates a parameter, unless all groups are as they were.

        Drivers ask for one parameter after another. Loading a state replaces the groups.
        """
        owners = [(one, group) for one in self._rules for group in one.param_groups]
        sizes = [(id(group), len(group["params"])) for _, group in owners]
        if sizes != self._sizes:
            self._sizes = sizes
            self._owners = {id(one): owner for owner in owners for one in owner[1]["params"]}

    def _move(self, name: str, values: Tensor) -> Move | None:
        """Return how two steps with this memory move a parameter; None if it stays.

        If the scheme corrects a momentum, which the optimiser then lacks, the memory is a sum of
        velocities, 1/(1 − momentum) times as long as one of gradients.
        """
        parameter, corrected = self.parameters[name], self._residuals.template.momentum
        memory, owner = self._residuals.of(name).get("memory"), self._owners.get(id(parameter))
        if memory is None or owner is None:
            return None
        optimizer, group = owner
        settings = {
            **group,
            "shape": parameter.shape,
            "lr": float(group["lr"]) * (1 - corrected) * (-1 if group.get("maximize") else 1),
            "momentum": corrected or group.get("momentum", 0.0),
        }
        state = {key: _local(one) for key, one in optimizer.state.get(parameter, {}).items()}
        return self._rules[optimizer](self._arrange(memory, values), settings, state)


def _local(value: Any) -> Any:
    """Return this rank's shard of a DTensor, through which gradients flow; all else as it is."""
    return value.to_local() if hasattr(value, "to_local") else value


def _like(values: Tensor, moved: Tensor) -> Tensor:
    """Return what has moved, with gradients that reach the values."""
    if not values.requires_grad:
        return moved
    standing: Tensor = torch.ops.aten._unsafe_view(values, values.shape)
    standing.data = moved
    return standing


def _rule_of(optimizer: Optimizer) -> Rule | None:
    """Return how two steps of an optimiser move parameters, None if that is not known."""
    if isinstance(optimizer, SaysTwoSteps):
        return partial(_along, optimizer.two_steps)
    return next((rule for kind, rule in _RULES.items() if isinstance(optimizer, kind)), None)


def _along(
    two_steps: Callable[..., tuple[float, Tensor]],
    gradient: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Move:
    rate, direction = two_steps(gradient, group, state)
    return kernels.Along(direction, rate)


_RULES: dict[type[Optimizer], Rule] = {
    torch.optim.SGD: partial(_along, sgd_two_steps),
    torch.optim.Muon: partial(_along, muon_two_steps),
    torch.optim.Adam: adam_move,
}
