"""Named parts of a program, for torch.profiler and for stopwatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.autograd import profiler

Stopwatch = Callable[[str], AbstractContextManager[object]]
"""Returns a block that times the part of that name."""

_stopwatch: Stopwatch | None = None


@contextmanager
def profiled(name: str) -> Iterator[None]:
    """Show a block as ``sparcel::{name}`` in the profiles of torch.profiler, and time it."""
    # Without a profiler, record_function would still cost tens of microseconds. This flag holds for
    # all threads; torch.autograd._profiler_enabled() is true on the thread that started it alone.
    active = profiler._is_profiler_enabled
    shown = profiler.record_function(f"sparcel::{name}") if active else nullcontext()
    with shown, timed(name):
        yield


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Give a block, or a function, to the stopwatch if one runs."""
    if _stopwatch is None:
        yield
    else:
        with _stopwatch(name):
            yield


@contextmanager
def timed_by(stopwatch: Stopwatch) -> Iterator[None]:
    """Let a stopwatch time the parts that run meanwhile, on any thread."""
    global _stopwatch
    _stopwatch = stopwatch
    try:
        yield
    finally:
        _stopwatch = None
