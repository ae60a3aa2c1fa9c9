"""Times the phases of a call: selecting, encoding, exchanging and reducing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from sparcel.profiling import timed_by

_PHASE_OF = {
    "select": "select",
    "encode": "encode",
    "decode": "encode",
    "messages": "exchange",
    "reduce": "reduce",
    "update": "reduce",
}
"""The phase of each part of a program that counts; see `sparcel.profiling`."""

PHASES = tuple(dict.fromkeys(_PHASE_OF.values()))


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
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block as of the phase of this part, if it has one."""
        if name not in _PHASE_OF:
            yield
            return
        self._switch()
        self._running.append(_PHASE_OF[name])
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
def watched() -> Iterator[Stopwatch]:
    """Time the phases of the calls in the block, on any thread, one call at a time."""
    watch = Stopwatch()
    with timed_by(watch.part):
        yield watch
