"""Times the phases of a call: selecting, encoding, exchanging and reducing."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from sparcel import kernels, stream
from sparcel.comm import Communicator
from sparcel.formats import Coo
from sparcel.wire import Wire

PHASES = ("select", "encode", "exchange", "reduce")

_WORDS = {
    "select": ("topk", "select", "histogram"),
    "encode": ("quantize",),
    "reduce": ("reduce", "merge", "scatter", "concatenate"),
}
"""By phase, words in the names of its functions, in the modules of `_ROOMS`."""

_ROOMS = (kernels, stream)

_METHODS = (
    (stream.SparseStream, "topk", "select"),
    (Wire, "encode", "encode"),
    (Wire, "decode", "encode"),
    (Coo, "reduce_messages", "reduce"),
)
"""Methods that belong to a phase: class, name and phase."""

_EXCHANGES = ("exchange", "exchange_parts", "gather", "all_reduce")


class Stopwatch:
    """Seconds by phase. A phase inside another one stops the outer one's clock."""

    def __init__(self) -> None:
        self.restart()
        self._running: list[str] = []
        self._since = 0.0

    def restart(self) -> None:
        """Count from zero."""
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as of phase ``name``."""
        self._switch()
        self._running.append(name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        now = perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


@contextmanager
def watched(comm: Communicator) -> Iterator[Stopwatch]:
    """Time the phases of the calls in the block, on any thread, one call at a time.

    Inside the block, timed functions replace those of each phase in all of sparcel's modules.
    Outside of it the stopwatch costs nothing.
    """
    watch = Stopwatch()
    undo: list[Callable[[], None]] = []

    def replace(owner: Any, name: str, phase: str) -> None:
        own = vars(owner).get(name)
        undo.append(
            functools.partial(delattr, owner, name)
            if own is None
            else functools.partial(setattr, owner, name, own)
        )
        setattr(owner, name, _timed(getattr(owner, name), watch, phase))

    try:
        for function, phase in _functions().items():
            for module, name in _holders(function):
                replace(module, name, phase)
        for owner, name, phase in _METHODS:
            replace(owner, name, phase)
        for name in _EXCHANGES:
            replace(type(comm), name, "exchange")
        yield watch
    finally:
        for step in reversed(undo):
            step()


def _functions() -> dict[Callable[..., Any], str]:
    """Return the public functions to time, each with its phase."""
    return {
        held: phase
        for room in _ROOMS
        for name, held in vars(room).items()
        if inspect.isfunction(held) and not name.startswith("_")
        for phase, words in _WORDS.items()
        if any(word in name for word in words)
    }


def _holders(function: Callable[..., Any]) -> list[tuple[Any, str]]:
    """Return the modules that hold a function, each with the function's name there."""
    return [
        (module, name)
        for key, module in list(sys.modules.items())
        if key.startswith("sparcel.")
        for name, held in list(vars(module).items())
        if held is function
    ]


def _timed(function: Callable[..., Any], watch: Stopwatch, phase: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with watch.phase(phase):
            return function(*args, **kwargs)

    return timed
