"""Named parts of a program, for torch.profiler and for timers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

P = ParamSpec("P")
T = TypeVar("T")

Timer = Callable[[str], AbstractContextManager[object]]
"""Returns a block that times the part of that name."""

timer: Timer | None = None
"""The one that runs."""

_NOTHING = nullcontext()
"""One for all blocks, because steps have many."""


def profiled(name: str) -> AbstractContextManager[object]:
    """Give a block to the timer, or show it in torch.profiler's profiles, if one runs.

    Profiles show it as ``sparcel::{name}``.
    """
    if timer is not None:
        return timer(name)
    # Without a profiler, record_function would still cost tens of microseconds. This flag holds for
    # all threads; torch.autograd._profiler_enabled() is true on the thread that started it alone.
    active = profiler._is_profiler_enabled
    return profiler.record_function(f"sparcel::{name}") if active else _NOTHING


def timed(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Give the calls of a function to the timer, if one runs; profiles do not show them."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if (running := timer) is None:
                return function(*args, **kwargs)
            with running(name):
                return function(*args, **kwargs)

        return call

    return decorate


@contextmanager
def timed_by(one: Timer) -> Iterator[None]:
    """Let a timer time the parts that run meanwhile, on any thread."""
    global timer
    timer = one
    try:
        yield
    finally:
        timer = None
