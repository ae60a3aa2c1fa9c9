"""Watching the steps of all optimisers, by which step-ahead finds those that it follows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparcel.training.ahead import Ahead


class Watcher(Protocol):
    """Is told of the steps of all optimisers, as long as something else holds it."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Learn that an optimiser is about to do a step."""


class Follower:
    """Lets step-ahead follow the optimisers that do steps, and those that it is told of.

    Parameters
    ----------
    ahead
        What moves the parameters.
    before_step
        Called before each step of any optimiser.
    """

    def __init__(
        self, ahead: Ahead, before_step: Callable[[Optimizer], None] | None = None
    ) -> None:
        self._ahead, self._before_step = ahead, before_step
        self._groups: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many groups the optimisers have that are followed."""
        watch_steps(self)

    def follow(self, optimizer: Optimizer) -> None:
        """Move the parameters of this optimiser by its rule, as those that have done a step."""
        self._groups[optimizer] = len(optimizer.param_groups)
        self._ahead.follow(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Follow an optimiser that is new or has new groups."""
        if self._groups.get(optimizer) != len(optimizer.param_groups):
            self.follow(optimizer)
        if self._before_step is not None:
            self._before_step(optimizer)

    def end(self) -> None:
        """Look at no more steps."""
        _WATCHERS.discard(self)


def watch_steps(watcher: Watcher) -> Callable[[], None]:
    """Tell a watcher of the steps of all optimisers; return what ends that, and holds it."""
    _watch_optimizers()
    _WATCHERS.add(watcher)
    return partial(_WATCHERS.discard, watcher)


_WATCHERS: weakref.WeakSet[Watcher] = weakref.WeakSet()


@cache
def _watch_optimizers() -> None:
    """Tell all watchers of the steps of all optimisers, by one hook that stays."""

    def before_any_step(optimizer: Optimizer, *_: object) -> None:
        for watcher in tuple(_WATCHERS):
            watcher.before_step(optimizer)

    register_optimizer_step_pre_hook(before_any_step)
