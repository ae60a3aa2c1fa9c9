"""When DDP's passes are ahead: from the forward pass to the end of the backward pass."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparcel.training import Averager
from sparcel.training.ahead import Ahead


class AheadPasses:
    """Moves a model's parameters ahead before each forward pass that has a backward pass.

    The hook of the exchange moves them back as soon as the gradients are computed. Should a
    backward pass never come, the next evaluation, ``state_dict()`` or step of an optimiser moves
    them back. Optimisers are found at their first step, before which there is no memory.
    """

    def __init__(self, model: DistributedDataParallel, averager: Averager, ahead: Ahead) -> None:
        self._averager, self._ahead = averager, ahead
        self._groups: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many groups the optimisers have that are followed."""
        model.register_forward_pre_hook(self._before_forward)
        back = _Back(self)
        model.module.register_forward_pre_hook(back.before_forward)
        model.module.register_state_dict_pre_hook(back)
        model.module.register_load_state_dict_pre_hook(back)
        _watch_optimizers()
        _ATTACHED.add(self)

    def follow(self, optimizer: Optimizer) -> None:
        """Move the parameters of this optimiser by its rule, as those that have done a step."""
        self._groups[optimizer] = len(optimizer.param_groups)
        self._ahead.follow(optimizer)

    def end(self) -> None:
        """Move the parameters back; all gradients are computed."""
        self._ahead.back()

    def before_step(self, optimizer: Optimizer) -> None:
        """Move the parameters back before an optimiser's step, and follow it if it is new."""
        if self._ahead.concerns(optimizer):
            self._ahead.back()
        if self._groups.get(optimizer) != len(optimizer.param_groups):
            self.follow(optimizer)

    def _before_forward(self, model: nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled() and model.training and not self._averager.closed:
            self._ahead.move()
        else:
            self._ahead.back()


class _Back:
    """A hook of the wrapped module, which moves its parameters back; a copy of it does nothing.

    The module may outlive its training, be copied (as averages of weights are), and be saved whole.
    """

    def __init__(self, passes: AheadPasses | None = None) -> None:
        self._passes = None if passes is None else weakref.ref(passes)

    def __reduce__(self) -> tuple[type[_Back], tuple[()]]:
        return _Back, ()

    def __call__(self, *_: object) -> None:
        passes = None if self._passes is None else self._passes()
        if passes is not None:
            passes.end()

    def before_forward(self, module: nn.Module, arguments: Any) -> None:
        """Move back if the module is called without DDP, to evaluate it."""
        if not (torch.is_grad_enabled() and module.training):
            self()


_ATTACHED: weakref.WeakSet[AheadPasses] = weakref.WeakSet()
"""All that may want to know of an optimiser's step."""


@cache
def _watch_optimizers() -> None:
    """Tell all `AheadPasses` of the steps of all optimisers, by one hook that stays."""

    def before_any_step(optimizer: Optimizer, *_: object) -> None:
        for passes in tuple(_ATTACHED):
            passes.before_step(optimizer)

    register_optimizer_step_pre_hook(before_any_step)


# What `torch.compiler.disable` sets, without importing the compiler, which takes seconds.
for _hook in (AheadPasses._before_forward, _Back.before_forward):
    setattr(_hook, "_torchdynamo_disable", True)  # noqa: B010


def as_in_buckets(memory: Tensor, parameter: Tensor) -> Tensor:
    """Arrange memory that lies as DDP lays gradients: in the parameter's own order of memory."""
    if _is_dense(parameter):
        return memory.as_strided(parameter.shape, parameter.stride())
    return memory.view(parameter.shape)


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor's elements fill a range of memory, in whatever order."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    expected = 1
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride != expected:
            return False
        expected *= size
    return True
