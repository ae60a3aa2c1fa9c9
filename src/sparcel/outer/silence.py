"""How often islands give signs of life, and how long one is silent that is taken for dead."""

from __future__ import annotations

_BEATS, _MOST_SECONDS, _SILENT = 5, 5.0, 2.5
"""How often an island gives signs of life in a patience, or how many seconds apart at most; and
after how many times without one it is taken for dead."""


def beat_seconds(patience: float) -> float:
    """Return how often an island gives a sign of life."""
    return min(_MOST_SECONDS, patience / _BEATS)


def silent_seconds(patience: float) -> float:
    """Return how long an island is silent that is taken for dead."""
    return _SILENT * beat_seconds(patience)


class Watch:
    """Tells for how long an island has given no sign of life.

    Parameters
    ----------
    seconds
        How often to look for one.

    Attributes
    ----------
    quiet
        Seconds in which it was watched, and gave none.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._passed = seconds
        self._before = self.quiet = 0.0
        self._signs: str | None = None

    def is_due(self, now: float) -> bool:
        """Return whether to look for a sign of life now, and to call `hear`."""
        # This one, or the place, may have stood still since the last call.
        self._passed += min(now - self._before, self._seconds)
        self._before = now
        return self._passed >= self._seconds

    def hear(self, signs: str) -> None:
        """Take in what sums up its signs of life."""
        self.quiet = self.quiet + self._passed if signs == self._signs else 0.0
        self._signs, self._passed = signs, 0.0
