"""Where the time of a call goes: a stopwatch around what selects, encodes, exchanges, reduces."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from sparcel import formats, kernels, stream
from sparcel.comm import Communicator

PHASES = ("select", "encode", "exchange", "reduce")

_FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "select": (
        kernels.topk,
        kernels.topk_chunked,
        kernels.accumulate_topk,
        kernels.threshold_select,
        kernels.magnitude_histogram,
    ),
    "encode": (formats.encode, formats.decode, formats.decode_all),
    "reduce": (
        stream.reduce,
        stream.concatenate,
        kernels.merge,
        kernels.scatter,
        kernels.scatter_reduce,
    ),
}
_METHODS = {
    "select": (stream.SparseStream, ("topk",)),
    "exchange": (Communicator, ("exchange", "exchange_parts", "all_reduce")),
}


class Stopwatch:
    """Seconds by phase. Phases exclude each other: one inside another stops the outer one."""

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
    """Time the phases of what runs in the block, on whichever thread, one call at a time.

    The functions and methods of each phase are replaced wherever sparcel's modules hold them, so
    that they cost nothing else outside of the block.
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
        for phase, functions in _FUNCTIONS.items():
            for module, name in _holders(functions):
                replace(module, name, phase)
        for phase, (kind, names) in _METHODS.items():
            for name in names:
                replace(type(comm) if kind is Communicator else kind, name, phase)
        yield watch
    finally:
        for step in reversed(undo):
            step()


def _holders(functions: tuple[Callable[..., Any], ...]) -> list[tuple[Any, str]]:
    modules = [module for name, module in sys.modules.items() if name.startswith("sparcel.")]
    return [
        (module, name)
        for module in modules
        if module.__name__ != __name__
        for name, held in list(vars(module).items())
        if any(held is function for function in functions)
    ]


def _timed(function: Callable[..., Any], watch: Stopwatch, phase: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with watch.phase(phase):
            return function(*args, **kwargs)

    return timed
