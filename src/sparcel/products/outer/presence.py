"""An island at a place: its number, its settings, and what it and others tell when they come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sparcel.core.comm import digest
from sparcel.errors import CommunicationError, MismatchError
from sparcel.products.outer.history import (
    Create,
    History,
    Now,
    Read,
    Run,
    Signs,
    Wait,
    Watches,
    first_missing,
)

_MOST_APART = 4
"""For how many times the patience two islands take no part together that did not connect."""


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


class Presence:
    """An island as others know it, and what it knows of them: parameters are those of `Protocol`.

    Attributes
    ----------
    place
        The text that tells the run at this place from others.
    island
        The number of this island, which no other gets at this place.
    order
        Where it stands among the members of an attempt.
    at
        The attempt after which it holds what is shared, 0 if there was none at this place.
    origin
        Place, number and ``at`` of the island that has last taken part: this one, or that whose
        checkpoint it has loaded. Checkpoints are saved under them.
    steps
        How many outer steps it holds.
    state
        What sums up what it holds, where ``at`` is 0.
    """

    def __init__(self, nonce: str, facts: dict[str, str], layout: str, patience: float) -> None:
        self._nonce, self._facts, self._layout = nonce, facts, layout
        self._told, self._patience = json.dumps(facts, sort_keys=True), patience
        self.place, self.island, self.order, self._lives = "", 0, 0, 1
        self.at, self.steps, self.state, self.origin = 0, 0, "", ("", 0, 0)
        self._history, self._watches = History(), Watches(patience)
        self._came: dict[int, list[Came]] = {}
        self._mine: tuple[int, int, Came] | None = None
        """The attempt and the slot to which this island came last, and what it told."""
        self._apart: dict[int, tuple[int, float, str]] = {}
        """How often in a row an island was not reached, until when it is apart, and why."""
        self._is_new = True
        """Whether it has not gone on from a checkpoint, nor taken part, under its number."""
        self._brings: list[int] = []
        """The islands that it has hosted since its last outer step."""
        self._heir_of: list[str] = []
        """The islands in whose places it goes on."""

    @property
    def _own(self) -> str:
        """What this island's number is known by: no other's is the same."""
        return f"{self._nonce}.{self._lives} {self._told}"

    @property
    def _key(self) -> str:
        return name_of(self.place, self.island)

    @property
    def holds(self) -> tuple[int, int, str]:
        """The attempt after which it holds what is shared, steps, and what sums it up at 0."""
        return self.at, self.steps, "" if self.at else self.state

    def _take_number(self) -> Run[None]:
        """Take a number; check the facts of those who wait for the run to begin, too."""
        number = (yield from first_missing("island.{}", 1)) if self._history.latest else 1
        while (text := (yield Create(f"island.{number}", self._own))) != self._own:
            facts = text.partition(" ")[2]
            if (
                not self._history.latest
                and facts != self._told
                and (yield from self._is_alive(number))
            ):
                yield from self._check_facts(facts)
            number += 1
        self.island = self.order = number
        self.origin, self._is_new = (self.place, number, 0), True

    def _is_alive(self, island: int) -> Run[bool]:
        """Wait for a sign of life of an island."""
        since, first = (yield Now()), (yield Signs(island))
        while first and (waited := (yield Now()) - since) < self._watches.silent:
            if (yield Signs(island)) != first:
                return True
            yield Wait(waited)
        return False

    @staticmethod
    def _check_ended() -> Run[None]:
        if (yield Read("ended")) is not None:
            raise CommunicationError("the run at this place has ended; name another one")

    def _check_facts(self, text: str) -> Run[None]:
        first: dict[str, str] = json.loads(text)
        if first == self._facts:
            return
        odd = [name for name in self._facts if self._facts[name] != first.get(name)]
        if odd == ["layout"]:
            lines = ((yield Read(f"layout.{first['layout']}")) or "").splitlines()
            pairs = zip([*self._layout.splitlines(), "nothing"], [*lines, "nothing"], strict=False)
            here, there = next((one, other) for one, other in pairs if one != other)
            text = f"other tensors: {here}, where the run has {there}"
        else:
            here, there = (
                ", ".join(f"{name}={facts.get(name)}" for name in odd if name != "layout")
                for facts in (self._facts, first)
            )
            text = f"other settings: {here}, where the run has {there}"
        raise MismatchError(f"this island has {text}; start all alike, or name another run")

    def _check_living(self, last: dict[int, Came]) -> Run[None]:
        """Check that the first of those who live has this island's settings, and its beginning."""
        me = self.island
        alive = {n: one for n, one in last.items() if n == me or self._watches.speaks(n)}
        first = alive[min(alive)]
        if first.facts != alive[me].facts:
            text = yield Read(f"island.{first.island}")
            yield from self._check_facts(text.partition(" ")[2] if text else self._told)
        check_state(alive, me)

    def _come(self, now: float) -> Run[None]:
        """Tell what this island holds, unless the others know it."""
        came = Came(
            self.island,
            self.order,
            *self.holds,
            f"{digest(self._told, 128):032x}",
            [one for one, (_, until, _) in self._apart.items() if until > now],
            [*self._brings],
            [*self._heir_of],
        )
        number = self._history.next
        if self._mine is not None and (self._mine[0], self._mine[2]) == (number, came):
            return
        yield from self._look(number)  # it may have told the same before, and was not hosted
        slot, text = len(self._came[number]) + 1, json.dumps(came._asdict())
        while (yield Create(f"{number}.came.{slot}", text)) != text:
            slot += 1
        self._mine = number, slot, came

    def _look(self, number: int) -> Run[None]:
        """Learn who has come to an attempt."""
        came = self._came.setdefault(number, [])
        while (text := (yield Read(f"{number}.came.{len(came) + 1}"))) is not None:
            came.append(Came(**json.loads(text)))

    def _last(self, number: int) -> Run[dict[int, Came]]:
        """Return what each island that has come to an attempt has told last."""
        yield from self._look(number)
        return {one.island: one for one in self._came[number]}

    def _silent(self, islands: Iterable[int], now: float) -> Run[set[int]]:
        """Return those of these islands that have given no sign of life for long."""
        for one in sorted(islands):
            if self._watches.is_due(one, now):
                self._watches.hear(one, (yield Signs(one)))
        return {one for one in islands if self._watches.is_silent(one)}

    def _keep_apart(self, islands: Sequence[int], why: str) -> Run[None]:
        now = yield Now()
        for one in islands:
            times = self._apart.get(one, (0,))[0]
            until = now + self._patience * min(2**times, _MOST_APART)
            self._apart[one] = times + 1, until, why

    def _why(self) -> str:
        """Return why islands were not reached."""
        return "".join(f" (island {one}: {why})" for one, (_, _, why) in self._apart.items())
