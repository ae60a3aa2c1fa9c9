"""What optimisers share: checks of states, and of LARS and LAMB steps by the layers' norms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparcel.core import device, kernels
from sparcel.core._checks import all_finite, check_type, checked_flag, checked_number, checked_whole
from sparcel.core.comm import Call, Group, ranks_with_other, resolve_or_alone
from sparcel.core.optim.parallel import flat, parallel
from sparcel.errors import InputError, MismatchError


class ChecksStates(torch.optim.Optimizer, ABC):
    """An optimiser that checks a state before it takes over anything of it."""

    _TOGETHER: Collection[str] = ()
    """The entries of a parameter's state that it has all of, or none."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, for the same parameters in the same order.

        torch's states tell parameters by their places. Those of another order are found if shapes
        differ, or if the parameters were given with names, ``model.named_parameters()``.

        Raises
        ------
        InputError
            For the state of another kind of optimiser or of other parameters, and for values that
            no state has; nothing changes then.
        """
        hint = f"load what state_dict() of a {type(self).__name__} returned"
        check_type(state_dict, dict, "state_dict", hint)
        # Hooks of others come first: they may change what is loaded.
        hook = self.register_load_state_dict_pre_hook(
            ChecksStates._check_state  # type: ignore[arg-type]
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    @abstractmethod
    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise `InputError` if a setting of a group is wrong."""

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raise `InputError` unless this optimiser can go on from a state."""
        kind = type(self).__name__
        hint = f"load what state_dict() of a {kind} with the same parameters returned"
        for key, expected in (("state", dict), ("param_groups", list)):
            check_type(state.get(key), expected, f"the state's {key!r}", hint)
        groups, own_groups = state["param_groups"], self.param_groups
        for group in groups:
            check_type(group, dict, "each of the state's groups", hint)
            if missing := self.defaults.keys() - group.keys():
                raise InputError(
                    f"this is not the state of a {kind}: its groups have no"
                    f" {', '.join(sorted(missing))}"
                )
            self._check_group(group)
            check_type(group.get("params"), list, "what a group of the state calls 'params'", hint)
        sizes = [len(group["params"]) for group in groups]
        own_sizes = [len(group["params"]) for group in own_groups]
        if sizes != own_sizes:
            raise InputError(
                f"the state must have groups of {own_sizes} parameters, got {sizes}; {hint}"
            )
        for group, own in zip(groups, own_groups, strict=True):
            _check_names(group.get("param_names"), own.get("param_names"))
            for place, parameter in zip(group["params"], own["params"], strict=True):
                entries = state["state"].get(place, {})
                name = f"the state's entry {place!r}"
                check_type(entries, dict, name, hint)
                if entries and (missing := set(self._TOGETHER) - entries.keys()):
                    raise InputError(f"{name} must have {sorted(missing)}; {hint}")
                for key, value in entries.items():
                    _check_entry(key, value, parameter, f"{key!r} in {name}", hint)


def _check_names(saved: object, own: list[str] | None) -> None:
    """Raise `InputError` if both groups name their parameters, and not alike."""
    if saved is None or own is None or saved == own:
        return
    check_type(saved, list, "the state's 'param_names'", "leave them out, or give all of them")
    assert isinstance(saved, list)
    one, two = next(pair for pair in zip_longest(saved, own) if pair[0] != pair[1])
    raise InputError(
        f"the state was saved for other parameters, or for the same in another order: it has"
        f" {one!r} where the optimiser has {two!r}; make the optimiser with its parameters in the"
        " saved order"
    )


def _check_entry(key: str, value: object, parameter: Tensor, name: str, hint: str) -> None:
    """Raise `InputError` unless an entry of a parameter can be what its name says."""
    if key == "step":
        checked_whole(value, name, at_least=1, hint=hint)
    elif key == "trust_ratio":
        checked_number(value, name, at_least=0, below=math.inf, hint=hint)
    elif key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        check_type(value, Tensor, name, hint)
        assert isinstance(value, Tensor)
        if value.shape != parameter.shape or not value.is_floating_point() or value.is_meta:
            raise InputError(
                f"{name} must hold floats of shape {tuple(parameter.shape)}, got {value.dtype} of"
                f" shape {tuple(value.shape)} on {value.device}; {hint}"
            )
        if not all_finite(value):
            raise InputError(
                f"{name} must be finite, got NaN or Inf, which would enter the parameters; load a"
                " state that was saved before"
            )


Tensors = tuple[Tensor, ...] | list[Tensor]
Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(slots=True)
class LayerStep:
    """A parameter in a step.

    Attributes
    ----------
    adapted
        Whether it has a trust ratio and weight decay.
    slope, size
        The norms of the gradient and of the parameter, which is 0 if this is not adapted.
    """

    parameter: Tensor
    gradient: Tensor
    adapted: bool
    slope: float = 0.0
    size: float = 0.0


Batch = tuple[dict[str, Any], list[LayerStep]]
"""A group, and layers of it that are changed together."""


class LayerWise(ChecksStates):
    """An optimiser whose steps are in proportion to the norm of each layer's parameters."""

    # A copy of an optimiser, or one that was pickled, computes all norms by itself: groups of
    # processes can't be copied, and the bits are the same.
    _parallel: bool = False
    _group: Group = None
    _alike = False
    """Whether the ranks' norms were compared."""
    _plain_two_steps: ClassVar[Callable[..., tuple[float, Tensor]]]
    """Says how far two steps would go without trust ratios."""

    def __init__(
        self,
        params: Parameters,
        own: dict[str, Any],
        exclude_vectors: bool,
        foreach: bool | None,
        parallel: bool,
        group: Group,
    ) -> None:
        parallel = checked_flag(parallel, "parallel")
        if group is not None and not parallel:
            raise InputError(
                "group names the ranks that share the norms, which they do with parallel=True only;"
                " pass both or neither"
            )
        shared = {"exclude_vectors": exclude_vectors, "foreach": foreach}
        super().__init__(params, {**own, **shared})
        self._parallel, self._group = parallel, group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own.

        Raises
        ------
        InputError
            For settings out of their range, and for parameters that are not of a float dtype, or
            that are shards.
        """
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._alike = False
        try:
            for parameter in self.param_groups[-1]["params"]:
                self._check_parameter(parameter)
        except InputError:
            self.param_groups.pop()
            raise

    def _check_parameter(self, parameter: Tensor) -> None:
        """Raise `InputError` if the norm of a parameter cannot be known."""
        kind = type(self).__name__
        if not parameter.is_floating_point():
            raise InputError(f"{kind} needs parameters of a float dtype, got {parameter.dtype}")
        if hasattr(parameter, "to_local"):
            raise InputError(
                f"{kind} needs whole parameters for their norms, got a shard (a DTensor); use an"
                " optimiser of torch with fully_shard"
            )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        checked_number(group["lr"], "lr", at_least=0)
        checked_number(group["weight_decay"], "weight_decay", at_least=0)
        checked_flag(group["exclude_vectors"], "exclude_vectors")
        if group["foreach"] is not None:
            checked_flag(group["foreach"], "foreach")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the parameters that have a gradient; all ranks call with ``parallel``.

        If any gradient holds NaN or Inf, or is so large that its norm is not finite in float64,
        nothing changes. So a step in which the exchange voided all gradients has no effect.

        Parameters
        ----------
        closure
            Computes the loss and the gradients anew.

        Returns
        -------
        What ``closure`` returned.

        Raises
        ------
        InputError
            For sparse gradients; nothing changes then.
        MismatchError, CommunicationError
            See `sparcel.core.optim.parallel`. No parameter changes on this rank then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = [(group, batch) for group in self.param_groups for batch in _batches(group)]
        layers = [layer for _, batch in batches for layer in batch]
        adapted = [layer for layer in layers if layer.adapted]
        tensors = [one.gradient for one in layers] + [one.parameter for one in adapted]
        norms = iter(self._norms(tensors))
        for layer in layers:
            layer.slope = next(norms)
        for layer in adapted:
            layer.size = next(norms)
        if all(math.isfinite(layer.slope) for layer in layers):
            self._move(batches)
        return loss

    @abstractmethod
    def _move(self, batches: Sequence[Batch]) -> None:
        """Change the parameters."""

    @classmethod
    def two_steps(
        cls, gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[float, Tensor]:
        """Say how far two steps go, as `SaysTwoSteps` asks.

        They go as far as those of SGD or Adam, times the trust ratio. It is that of the last step,
        because the gradient is a part of what a step will see.
        """
        rate, direction = cls._plain_two_steps(gradient, group, state)
        return rate * state.get("trust_ratio", 0.0), direction

    def _norms(self, tensors: Sequence[Tensor]) -> list[float]:
        """Return the norm of each tensor; the ranks share the work if that was asked for."""
        vectors = [flat(tensor) for tensor in tensors]
        if self._parallel and self._alike:
            squares = parallel(kernels.sums_of_squares, vectors, self._group, additive=True)
        else:
            squares = kernels.sums_of_squares(vectors)
        found = device.read(squares).tolist()
        if self._parallel and not self._alike:
            self._compare(found)
            self._alike = True
        return [math.sqrt(square) for square in found]  # torch's root is less exact

    def _compare(self, squares: list[float]) -> None:
        """Raise `MismatchError` unless all ranks have found the same of all tensors.

        Ranks that have other tensors, or the same in another order, would get one another's norms.
        """
        comm = resolve_or_alone(self._group)
        if comm is None:
            return
        call = Call.of("norms", {})
        if others := comm.call(call, lambda: ranks_with_other(repr(squares), comm)):
            raise MismatchError(
                f"ranks {others} have other parameters or gradients than rank {comm.rank}, or the"
                " same in another order; give the optimiser the same parameters in the same order"
                " on all ranks, from a list and not from a set, and average the gradients first,"
                " or leave out parallel=True"
            )

    def _scaled(
        self,
        directions: Tensors,
        group: Mapping[str, Any],
        layers: Iterable[LayerStep],
        ratios: Sequence[float],
    ) -> Tensors:
        """Return directions times the rate and the layers' trust ratios, and remember these."""
        for layer, one in zip(layers, ratios, strict=True):
            self.state[layer.parameter]["trust_ratio"] = one
        rate = float(group["lr"])
        return torch._foreach_mul(directions, [rate * one for one in ratios])


def ratio(above: float, below: float) -> float:
    """Return ``above / below``; 1 if one of them is 0."""
    return above / below if above and below else 1.0


def _batches(group: Mapping[str, Any]) -> Iterator[list[LayerStep]]:
    """Yield the layers of a group that have gradients, in lists that are changed together."""
    layers = [_layer(one, group) for one in group["params"] if one.grad is not None]
    foreach = group["foreach"]
    if foreach is None:
        # A launch costs nothing on a CPU, and what one tensor needs may stay in the cache.
        foreach = not all(layer.parameter.is_cpu for layer in layers)
    if not foreach:
        yield from ([layer] for layer in layers)
        return
    for adapted in (True, False):
        alike = [layer for layer in layers if layer.adapted == adapted]
        if alike:
            yield alike


def _layer(parameter: Tensor, group: Mapping[str, Any]) -> LayerStep:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise InputError(
            f"gradients must be dense, got one of layout {gradient.layout} for a parameter of shape"
            f" {tuple(parameter.shape)}; give it an optimiser of its own, such as"
            " torch.optim.SparseAdam, or make its layer with sparse=False"
        )
    return LayerStep(parameter, gradient, not (group["exclude_vectors"] and parameter.ndim <= 1))
