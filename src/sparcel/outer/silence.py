"""How often islands give signs of life, and which are silent for so long that they are dead."""

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


class Watches:
    """Tells which islands have given no sign of life for long, since they were first asked for."""

    def __init__(self, patience: float) -> None:
        self._beat, self._silent = beat_seconds(patience), silent_seconds(patience)
        self._watches = dict[int, _Watch]()

    def is_due(self, island: int, now: float) -> bool:
        """Let time go by; return whether to look for a sign of life now, and to call `hear`."""
        watch = self._watches.setdefault(island, _Watch(self._beat))
        # This one, or the place, may have stood still since the last call.
        watch.passed += min(now - watch.before, self._beat)
        watch.before = now
        return watch.passed >= self._beat

    def hear(self, island: int, signs: str) -> None:
        """Take in what sums up an island's signs of life."""
        watch = self._watches[island]
        is_new = signs != watch.signs
        watch.speaks |= is_new and watch.signs is not None
        watch.quiet = 0.0 if is_new else watch.quiet + watch.passed
        watch.signs, watch.passed = signs, 0.0

    def is_silent(self, island: int) -> bool:
        """Return whether an island is taken for dead."""
        return self._watches[island].quiet >= self._silent

    def speaks(self, island: int) -> bool:
        """Return whether an island has given a sign of life since it was first asked for."""
        return self._watches[island].speaks

    def clear(self) -> None:
        """Watch all anew."""
        self._watches.clear()


class _Watch:
    """What is known of an island.

    Attributes
    ----------
    passed
        Seconds since the last look for its signs of life, at most one beat for each time that it
        was asked for.
    before
        When it was last asked for.
    signs
        What summed them up.
    quiet
        Seconds in which it was watched, and gave none.
    speaks
        Whether they have changed.
    """

    def __init__(self, passed: float) -> None:
        self.passed, self.before, self.quiet = passed, 0.0, 0.0
        self.signs: str | None = None
        self.speaks = False
