"""Named parts of a program, for torch.profiler and for stopwatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

P = ParamSpec("P")
T = TypeVar("T")

Stopwatch = Callable[[str], AbstractContextManager[object]]
"""Returns a block that times the part of that name."""

stopwatch: Stopwatch | None = None
"""The one that runs."""

_NOTHING = nullcontext()
"""One for all blocks, because steps have many."""


def profiled(name: str) -> AbstractContextManager[object]:
    """Give a block to the stopwatch, or show it in torch.profiler's profiles, if one runs.

    Profiles show it as ``sparcel::{name}``.
    """
    if stopwatch is not None:
        return stopwatch(name)
    # Without a profiler, record_function would still cost tens of microseconds. This flag holds for
    # all threads; torch.autograd._profiler_enabled() is true on the thread that started it alone.
    active = profiler._is_profiler_enabled
    return profiler.record_function(f"sparcel::{name}") if active else _NOTHING


def timed(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Give the calls of a function to the stopwatch, if one runs; profiles do not show them."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if (watch := stopwatch) is None:
                return function(*args, **kwargs)
            with watch(name):
                return function(*args, **kwargs)

        return call

    return decorate


@contextmanager
def timed_by(watch: Stopwatch) -> Iterator[None]:
    """Let a stopwatch time the parts that run meanwhile, on any thread."""
    global stopwatch
    stopwatch = watch
    try:
        yield
    finally:
        stopwatch = None
