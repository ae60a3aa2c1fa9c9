"""A small model that is trained ahead, and what torch's own optimisers make of its memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer

from sparcel.core.comm import Communicator
from sparcel.core.optim import LAMB, LARS
from sparcel.core.schemes import Hierarchical, OkTopK, Scheme, TopK
from tests.evenly import even_averager
from tests.training.tensors import Named, owed_by

Make = Callable[[Iterable[Tensor]], Optimizer]


class Training:
    """A small model, what averages its gradients, and its optimiser."""

    def __init__(
        self, comm: Communicator, make: Make, scheme: Scheme, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 50)).to(dtype)
        self.parameters = dict(self.model.named_parameters())
        for parameter in self.parameters.values():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 5)
        self.rank, self.dtype = comm.rank, dtype
        self.averager = even_averager(self.parameters, scheme, group=comm)
        self.optimizer = make(self.model.parameters())
        self.ahead = self.averager.ahead(self.parameters, self.optimizer)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + self.rank)
        data = torch.randn(8, 40, generator=generator).to(self.dtype)
        self.optimizer.zero_grad()
        output = functional_call(self.model, self.ahead.moved(), (data,))
        mse_loss(output, data.sum(1, keepdim=True).expand(8, 50)).backward()
        updates = self.averager.average({name: p.grad for name, p in self.parameters.items()})
        for name, parameter in self.parameters.items():
            parameter.grad = updates[name]
        self.optimizer.step()

    def now(self) -> Named:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def there(self) -> Named:
        """Return what the model computes with: moved values, and parameters that do not move."""
        moved = self.ahead.moved()
        return {name: moved.get(name, one).detach() for name, one in self.parameters.items()}


def trained(comm: Communicator, make: Make, scheme: Scheme, **settings: Any) -> Training:
    training = Training(comm, make, scheme, **settings)
    for number in range(3):
        training.step(number)
    return training


def moved_by_torch(training: Training, share: float) -> Named:
    """Return where a copy of the optimiser, without momentum, goes with the memory as gradients.

    It goes further by its momentum, or by that which the scheme corrects. Trust ratios stay as in
    the last step.
    """
    parameters = {name: nn.Parameter(start) for name, start in training.now().items()}
    theirs = training.optimizer
    mine = type(theirs)([{"params": [one]} for one in parameters.values()], lr=1.0)
    owed = owed_by(training.averager, training.rank)
    for (name, parameter), group in zip(parameters.items(), mine.param_groups, strict=True):
        (settings,) = (
            one
            for one in theirs.param_groups
            if any(training.parameters[name] is other for other in one["params"])
        )
        without = {"weight_decay": 0}
        if "momentum" in settings:
            without |= {"momentum": 0, "dampening": 0, "nesterov": False}
        group |= {**settings, **without, "params": group["params"]}
        state = copy.deepcopy(theirs.state[training.parameters[name]])
        if "exp_avg" in state:
            state["exp_avg"].zero_()
        mine.state[parameter] = state
        if name in owed:
            parameter.grad = owed[name].view(parameter.shape).to(parameter.dtype)
    starts = training.now()
    mine.step()
    defaults = theirs.defaults
    corrected = 1 - share
    momentum = defaults["betas"][0] if "betas" in defaults else corrected or defaults["momentum"]
    moved = {}
    for name, parameter in parameters.items():
        was, now = (
            optimizer.state[one].get("trust_ratio", 1.0)
            for optimizer, one in ((theirs, training.parameters[name]), (mine, parameter))
        )
        factor = (1 + momentum) * share * was / now
        moved[name] = starts[name] + factor * (parameter.detach() - starts[name])
    return moved


def with_groups(parameters: Iterable[Tensor]) -> Optimizer:
    first, *rest = parameters
    return SGD([{"params": [first], "lr": 0.3}, {"params": rest}], lr=0.05, weight_decay=0.1)


OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(SGD, lr=0.1),
    "SGD, decay": partial(SGD, lr=0.1, weight_decay=0.1),
    "SGD, momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "SGD, nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, maximize": partial(SGD, lr=0.01, momentum=0.5, maximize=True),
    "SGD, groups": with_groups,
    "Adam": partial(Adam, lr=0.01),
    "Adam, decay": partial(Adam, lr=0.01, betas=(0.7, 0.95), eps=0.01, weight_decay=0.1),
    "Adam, amsgrad": partial(Adam, lr=0.01, amsgrad=True),
    "Adam, lr as a tensor": lambda ps: Adam(ps, lr=torch.tensor(0.01), foreach=False),
    "AdamW": partial(AdamW, lr=0.01, weight_decay=0.1),
    "AdamW, maximize": partial(AdamW, lr=0.01, maximize=True),
    "LARS": partial(LARS, lr=2.0, momentum=0.5, weight_decay=0.1),
    "LAMB": partial(LAMB, lr=0.01, weight_decay=0.1),
}
SHARES: dict[str, tuple[Callable[[], Scheme], float]] = {
    "no momentum": (lambda: TopK(0.05), 1.0),
    "the scheme's momentum": (lambda: TopK(0.05, momentum=0.75), 0.25),
    "two levels": (lambda: Hierarchical(OkTopK(0.05), 2), 1.0),
}
LARGE = ("0.weight", "2.weight")

optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
