"""Who has come to an attempt, which of them can take part together, and who has fallen silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparcel.errors import MismatchError

_BEATS, _MOST_SECONDS, _SILENT = 5, 5.0, 2.5
"""How often an island gives signs of life in a patience, or how many seconds apart at most; and
after how many times without one it is taken for dead."""


class Came(NamedTuple):
    """What an island tells when it comes.

    Attributes
    ----------
    island, order
        Its number, and where it stands among others.
    at, steps, state
        What it holds: the attempt after which it was shared, 0 if there was none at this place;
        after how many outer steps; and what sums it up, where ``at`` is 0.
    facts
        What sums up its settings.
    apart
        Islands that it has not reached of late.
    brings
        Islands that it has hosted since its last outer step.
    heir_of
        The islands in whose places it goes on, each as `name_of` has it.
    """

    island: int
    order: int
    at: int
    steps: int
    state: str
    facts: str
    apart: Sequence[int] = ()
    brings: Sequence[int] = ()
    heir_of: Sequence[str] = ()

    @property
    def holds(self) -> tuple[int, int, str]:
        """What is the same for islands that can take part in one attempt, beside ``facts``."""
        return self.at, self.steps, self.state


Last = Mapping[int, Came]
"""What each island that has come to an attempt has told last, by its number."""


def name_of(place: str, island: int) -> str:
    """Return an island's name that no other has at any place."""
    return f"{place}.{island}"


def fitting(last: Last, place: str, me: int) -> list[int]:
    """Return islands that hold the same as this one and have reached one another, by rank."""
    mine, behind = last[me], {one for one, _ in replaced(last, place)}
    fit = [
        one
        for one in last.values()
        if (one.holds, one.facts) == (mine.holds, mine.facts) and one.island not in behind
    ]
    pairs = {(one.island, other) for one in fit for other in one.apart}
    pairs |= {(other, one) for one, other in pairs}

    def missed(island: int) -> int:
        return sum(one == island for one, _ in pairs)

    chosen: list[Came] = []
    for one in sorted(fit, key=lambda one: (missed(one.island), one.order, one.island)):
        if all((one.island, other.island) not in pairs for other in chosen):
            chosen.append(one)
    return [one.island for one in sorted(chosen, key=lambda one: (one.order, one.island))]


def replaced(last: Last, place: str) -> set[tuple[int, int]]:
    """Return pairs of an island and one that goes on in its place, and holds no less."""
    by_name = {name_of(place, one.island): one for one in last.values()}
    pairs = (
        (by_name[one], heir) for heir in last.values() for one in heir.heir_of if one in by_name
    )
    return {
        (one.island, heir.island)
        for one, heir in pairs
        if heir is not one and (heir.at, heir.steps) >= (one.at, one.steps)
    }


def ahead(last: Last, place: str, me: int) -> set[int]:
    """Return who holds what this island has to take over before the run begins, and is reached."""
    if me not in last:
        return set()
    more = {one.island for one in _beginning(last, me) if one.steps > last[me].steps}
    heirs = {heir for one, heir in replaced(last, place) if one == me}
    return (more | heirs) - {*last[me].apart}


def check_state(last: Last, me: int) -> None:
    """Check that this island begins with what the first has.

    Raises
    ------
    MismatchError
        When it does not.
    """
    first = next(one for one in _beginning(last, me) if one.steps == last[me].steps)
    if first.state != last[me].state:
        raise MismatchError(
            f"this island has other parameters to begin with than island {first.island}; start"
            " all from one seed, or from checkpoints of one run"
        )


def _beginning(last: Last, me: int) -> list[Came]:
    """Return those who have this island's settings, and have not taken part at this place."""
    return [one for one in last.values() if one.facts == last[me].facts and not one.at]


def beat_seconds(patience: float) -> float:
    """Return how often an island gives a sign of life."""
    return min(_MOST_SECONDS, patience / _BEATS)


@dataclass
class _Watch:
    """What is known of an island that is watched."""

    passed: float
    """Seconds since the last look for its signs of life, at most one beat for each time that it was
    asked for."""
    before: float = 0.0
    """When it was last asked for."""
    signs: str | None = None
    """What summed up its signs of life."""
    quiet: float = 0.0
    """Seconds in which it was watched, and gave none."""
    speaks: bool = False
    """Whether it has given one since it was first asked for."""


class Watches:
    """Tells which islands have given no sign of life for long, since they were first asked for.

    Attributes
    ----------
    silent
        After how many seconds without one an island is taken for dead.
    """

    def __init__(self, patience: float) -> None:
        self._beat = beat_seconds(patience)
        self.silent = _SILENT * self._beat
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
        return self._watches[island].quiet >= self.silent

    def speaks(self, island: int) -> bool:
        """Return whether an island has given a sign of life since it was first asked for."""
        return self._watches[island].speaks

    def clear(self) -> None:
        """Watch all anew."""
        self._watches.clear()
