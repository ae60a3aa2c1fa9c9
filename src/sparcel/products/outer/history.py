"""What a place tells: who took part in an attempt, whether that took effect, and who is silent.

At first, the actions of which an island's part of the protocol consists.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from sparcel.errors import CommunicationError

T = TypeVar("T")

BLOCK = 16
"""So many attempts in a row are summed up."""

COMMIT, ABORT = "commit", "abort"

_BEATS, _MOST_SECONDS, _SILENT = 5, 5.0, 2.5
"""How often an island gives signs of life in a patience, or how many seconds apart at most; and
after how many times without one it is taken for dead."""


class Create(NamedTuple):
    """Create a key unless it is there; the answer is the text that it has."""

    key: str
    text: str


class Read(NamedTuple):
    """The answer is a key's text, or None."""

    key: str


class Remove(NamedTuple):
    """Remove keys that nobody needs."""

    keys: list[str]


class Wait(NamedTuple):
    """Let time go by before the next look: the longer one has waited already, the longer."""

    waited: float


class Now(NamedTuple):
    """The answer is a time in seconds."""


class Gone(NamedTuple):
    """The answer is the set of members of the last attempt whose connections have ended."""


class Signs(NamedTuple):
    """The answer is what sums up an island's last signs of life; it is empty for none."""

    island: int


class Host(NamedTuple):
    """Begin to send what is shared to an island, beside all else, under a name of its own.

    `Protocol.holds` goes with it.
    """

    guest: int
    name: str


class Receive(NamedTuple):
    """Receive what is shared; the answer is what the host holds, or the error's text."""

    host: int
    name: str


Action = Create | Read | Remove | Wait | Now | Gone | Signs | Host | Receive
Run = Generator[Action, Any, T]
"""What yields actions, is sent their answers, and returns a result."""


class Quorum(NamedTuple):
    """Who takes part in an attempt: its members by rank, their facts, and what they all hold."""

    members: list[int]
    facts: str
    holds: list[int | str]


class History:
    """What one island knows of attempts that have been made.

    Old ones are summed up, so that the place does not grow: when two blocks of attempts have
    followed a block, its keys are replaced by one.

    Attributes
    ----------
    next
        The attempt that has no outcome yet, as far as it knows.
    latest
        The latest attempt that took effect, 0 for none.
    """

    def __init__(self) -> None:
        self.next, self.latest, self._closed = 1, 0, 0
        self._outcomes: dict[int, str] = {}

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt was aborted."""
        return self._outcomes.get(self.next - 1) == ABORT

    def look(self) -> Run[None]:
        """Learn which attempt is the next, and which was the latest that took effect."""
        self._closed = yield from first_missing("closed.{}", self._closed)
        if self._closed * BLOCK >= self.next:
            self.next = self._closed * BLOCK + 1
            self.latest = max(map(int, (yield from self._summed_up(self._closed - 1))))
        while (outcome := (yield from self._outcome(self.next))) is not None:
            self._outcomes[self.next] = outcome
            if outcome == COMMIT:
                self.latest = self.next
            self.next += 1
        self._outcomes = {
            number: outcome for number, outcome in self._outcomes.items() if number >= self.next - 1
        }

    def quorum(self, number: int) -> Run[Quorum | None]:
        """Return who takes part in an attempt, or None if it is not decided, or summed up."""
        text = yield Read(f"{number}.quorum")
        return Quorum(**json.loads(text)) if text else None

    def propose(self, number: int, quorum: Quorum) -> Run[Quorum]:
        """Propose who takes part in an attempt; return who does."""
        text = yield Create(f"{number}.quorum", json.dumps(quorum._asdict()))
        return Quorum(**json.loads(text))

    def decide(self, number: int, members: list[int], outcome: str) -> Run[str]:
        """Propose an attempt's outcome; return what it is."""
        outcome = yield Create(f"{number}.outcome", outcome)
        if (closed := (yield Read(_closed(number)))) is not None:  # it came late
            outcome = COMMIT if json.loads(closed).get(f"{number}") == members else ABORT
        self._outcomes[number] = outcome
        return outcome

    def is_over(self, number: int, may_be_old: bool) -> Run[bool]:
        """Return whether an attempt has an outcome, which may have been summed up."""
        if (yield Read(f"{number}.outcome")) is not None:
            return True
        return may_be_old and (yield from self.is_summed_up(number))

    def is_summed_up(self, number: int) -> Run[bool]:
        """Return whether others have summed up an attempt, so its keys decide nothing any more."""
        return (yield Read(_closed(number))) is not None

    def sum_up(self, latest: int) -> Run[None]:
        """Sum up a block of attempts, if two more have followed."""
        if latest <= (self._closed + 3) * BLOCK:
            return
        numbers = range(self._closed * BLOCK + 1, (self._closed + 1) * BLOCK + 1)
        before = yield from self._summed_up(self._closed - 1)
        last = max(before, key=int)
        commits = {last: before[last]}
        for number in numbers:
            if (yield Read(f"{number}.outcome")) == COMMIT:
                quorum = yield from self.quorum(number)
                commits[f"{number}"] = quorum.members if quorum else []
        yield Create(f"closed.{self._closed}", json.dumps(commits))
        yield Remove([f"{one}.{what}" for one in numbers for what in ("quorum", "outcome")])
        self._closed += 1

    def _outcome(self, number: int) -> Run[str | None]:
        """Return the outcome of an attempt, of which the place is told if it has forgotten it."""
        known: str | None = self._outcomes.get(number)
        if known is None:
            known = yield Read(f"{number}.outcome")
        elif (yield Create(f"{number}.outcome", known)) != known:
            raise forgotten(number)
        return known

    def _summed_up(self, block: int) -> Run[dict[str, list[int]]]:
        """Return who took part in a block's attempts that took effect, and in the last before."""
        text = (yield Read(f"closed.{block}")) if block >= 0 else None
        return dict(json.loads(text)) if text else {"0": []}


def _closed(number: int) -> str:
    """Return the key that sums up an attempt."""
    return f"closed.{(number - 1) // BLOCK}"


def forgotten(number: int) -> CommunicationError:
    """Return the error of a place that has lost what it had confirmed."""
    return CommunicationError(
        f"the place where islands meet has forgotten attempt {number}, and others have decided"
        " otherwise since; load the last checkpoints at another place"
    )


def first_missing(key: str, known: int) -> Run[int]:
    """Return the first number from ``known`` on whose key is not there; all before it are."""
    step = 1
    while (yield Read(key.format(known + step - 1))) is not None:
        known, step = known + step, 2 * step
    while step > 1:
        step //= 2
        if (yield Read(key.format(known + step - 1))) is not None:
            known += step
    return known


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
