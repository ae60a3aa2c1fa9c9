"""Stochastic gradient descent that applies updates which are streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core._checks import check_type, checked_number
from sparcel.core.ops import SUM
from sparcel.core.optim._base import ChecksStates
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
