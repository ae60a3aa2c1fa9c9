"""How islands agree who takes part in an outer step, and whether it takes effect.

An island's part is a state machine: generators that yield what is to be done, and are sent what
came of it. No socket, clock, thread or store is in it; `sparcel.outer.islands` drives it.

Islands write keys into a place, with one operation that counts: create what is not there. So the
first to write a key decides, for all and for ever. Attempts at outer steps have numbers:

``` text
5.came.1, 5.came.2, …     who has come, and what it holds
5.quorum                  who takes part
5.outcome                 "commit" or "abort"
5.host.2                  who sends what is shared to the one that came second, and is behind
```

Attempt 6 begins when 5 has an outcome. A member proposes to commit when all members have told it
that the exchange has arrived, and to abort when it has given up on one. The first proposal holds,
so a step takes effect on all its members or on none, and each learns it whenever it looks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sparcel.comm import digest
from sparcel.errors import CommunicationError, MismatchError
from sparcel.outer.actions import Create, Gone, Host, Now, Read, Receive, Remove, Run, Signs, Wait
from sparcel.outer.silence import Watch, beat_seconds, silent_seconds

BLOCK = 16
"""So many attempts in a row are summed up in one key when two such blocks have followed."""

_GRACE_SECONDS = 3.0
"""How long islands are waited for that may have failed with the last attempt."""

LONGEST, _LONGEST_BEGIN = 10, 60
"""For how many times the patience an island waits for what it needs, and for others to begin."""

_MOST_APART = 4
"""For how many times the patience two islands take no part together that did not connect."""

_COMMIT, _ABORT = "commit", "abort"


class Attempt(NamedTuple):
    """An attempt at an outer step: its number, and the islands that take part, by rank."""

    number: int
    members: list[int]


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
        The islands in whose places it goes on.
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


class Protocol:
    """One island's part.

    Parameters
    ----------
    nonce
        A text that nobody else has.
    facts
        What has to be the same on all islands, by name.
    layout
        The names and shapes of what is exchanged, one a line.
    least
        How many islands begin.
    patience
        Seconds for which an island is waited for.

    Attributes
    ----------
    island
        The number of this island, which no other gets at this place.
    order
        Where it stands among the members of an attempt.
    at
        The attempt after which it holds what is shared, 0 if there was none at this place.
    origin
        Place, number and ``at`` of the island, this one or one before it, that has last taken part:
        what it had not sent this one has, too.
    steps
        How many outer steps it holds.
    state
        What sums up what it holds, where ``at`` is 0.
    """

    def __init__(
        self, nonce: str, facts: dict[str, str], layout: str, least: int, patience: float
    ) -> None:
        self._nonce, self._least, self._patience = nonce, least, patience
        self._beat, self._silence = beat_seconds(patience), silent_seconds(patience)
        self._facts, self._layout = facts, layout
        self._told = json.dumps(facts, sort_keys=True)
        self.place, self.island, self.order, self._lives = "", 0, 0, 1
        self.at, self.steps, self.state, self.origin = 0, 0, "", ("", 0, 0)
        self._next, self._latest, self._closed = 1, 0, 0
        """The next attempt, the latest that took effect, and how many blocks are summed up."""
        self._outcomes: dict[int, str] = {}
        self._members: list[int] = []
        self._attempt = Attempt(0, [])
        self._came: dict[int, list[Came]] = {}
        self._mine: tuple[int, int, Came] | None = None
        """The attempt and the slot to which this island came last, and what it told."""
        self._apart: dict[int, tuple[int, float, str]] = {}
        """How often in a row an island was not reached, until when it is apart, and why."""
        self._watches: dict[int, Watch] = {}
        """The islands that are waited for."""
        self._began: float | None = None
        """Since when this island waits for the run to begin, or since the last attempt to."""
        self._brings: list[int] = []
        self._hosted: set[str] = set()
        """The names under which this island has hosted others, each once."""
        self._heir_of: list[str] = []
        self._keeps = False
        """Whether all that this island has moved and not sent began with what is shared here."""

    # To begin.

    def enter(self) -> Run[bool]:
        """Become an island of the run; return whether others go on with it.

        What they share has then been taken over.

        Raises
        ------
        MismatchError
            When the run has other facts.
        CommunicationError
            When it has ended.
        """
        yield from self._check_ended()
        self.place = yield Create("run", self._nonce)
        yield Create(f"layout.{self._facts['layout']}", self._layout)
        yield from self._find_next()
        quorum = yield from self._quorum(self._latest)
        yield from self._check_facts(quorum["facts"])
        yield from self._take_number()
        if self._latest:
            yield from self.take_over(quorum["members"])
        if not self.at:
            yield from self._check_ended()  # the others may have, meanwhile
        return self.at > 0

    def _take_number(self) -> Run[None]:
        """Take a number; check the facts of those who wait for the run to begin, too."""
        number = (yield from _first_missing("island.{}", 1)) if self._latest else 1
        while (text := (yield Create(f"island.{number}", self._own))) != self._own:
            facts = text.partition(" ")[2]
            if not self._latest and facts != self._told and (yield from self._is_alive(number)):
                yield from self._check_facts(facts)
            number += 1
        self.island = self.order = number
        self.origin = self.place, number, 0

    def resume(self, place: str, island: int, order: int, at: int) -> Run[None]:
        """Go on from a checkpoint, in the place of the island that has written it."""
        self.at, self.order, self._keeps = (at if place == self.place else 0), order, False
        self.origin = place, island, at
        key = f"{place}.{island}"
        while (heir := (yield Create(f"heir.{key}", self._key))) != self._key:
            self._heir_of.append(key)
            key = heir
        self._heir_of.append(key)

    @property
    def _own(self) -> str:
        """What this island's number is known by: no other's is the same."""
        return f"{self._nonce}.{self._lives} {self._told}"

    @property
    def _key(self) -> str:
        return f"{self.place}.{self.island}"

    @property
    def holds(self) -> tuple[int, int, str]:
        """The attempt after which it holds what is shared, steps, and what sums it up at 0."""
        return self.at, self.steps, "" if self.at else self.state

    def _is_alive(self, island: int) -> Run[bool]:
        """Wait for a sign of life of an island."""
        since, first = (yield Now()), (yield Signs(island))
        while first and (waited := (yield Now()) - since) < self._silence:
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

    # To meet.

    def meet(self) -> Run[Attempt | None]:
        """Wait for the others; return the attempt in which this island takes part.

        None if the run has gone on without it, or will begin with what others hold.
        """
        while True:
            yield from self._find_next()
            if self.at != self._latest:
                return None
            if (yield Create(f"island.{self.island}", self._own)) != self._own:
                yield from self._take_number()  # the place has forgotten this island
            quorum = yield from self._agree()
            if quorum is None:
                return None
            if self.island not in quorum["members"]:
                yield from self._wait_for_outcome(quorum["members"])
            elif quorum["holds"] == [*self.holds]:
                self._attempt = Attempt(self._next, quorum["members"])
                return self._attempt
            else:  # this island has taken over what others hold since it came
                yield Create(f"{self._next}.outcome", _ABORT)

    def decide(
        self, arrived: bool, held: bool, apart: Sequence[int] = (), why: str = ""
    ) -> Run[bool]:
        """Return whether the attempt takes effect.

        Parameters
        ----------
        arrived
            Whether all members have told that all has arrived.
        held
            Whether all has arrived here.
        apart, why
            Islands that were not reached, and the reason.
        """
        number, members = self._attempt
        self._began = None
        outcome = yield Create(f"{number}.outcome", _COMMIT if arrived else _ABORT)
        if (closed := (yield Read(f"closed.{_block(number)}"))) is not None:  # it came late
            outcome = _COMMIT if json.loads(closed).get(f"{number}") == members else _ABORT
        self._outcomes[number] = outcome
        if outcome == _ABORT:
            yield from self._keep_apart(apart, why)
            return False
        if not held:
            raise self._forgotten(number)
        self.at, self.steps = number, self.steps + 1
        self._members, self._keeps, self._brings, self._heir_of = members, True, [], []
        self.origin = self.place, self.island, number
        for one in members:
            self._apart.pop(one, None)
        return True

    def _agree(self) -> Run[dict[str, Any] | None]:
        """Wait until it is decided who takes part in the next attempt; None as `meet`."""
        number, since, self._watches = self._next, (yield Now()), {}
        if not self._latest:
            self._began = since = self._began or since
        while (decided := (yield Read(f"{number}.quorum"))) is None:
            now = yield Now()
            yield from self._come(now)
            last = yield from self._last(number)
            mine = last.get(self.island)
            if mine is None or mine.holds != self.holds:  # the others have gone on, and removed it
                return None
            if not self.at:
                if self._ahead(last):
                    return None
                self._check_state(mine, last)
                yield from self._welcome(number, {*last})
            fit = self._fitting(last)
            are_enough = yield from self._are_enough(last, fit, now, now - since)
            is_long = are_enough or now - since > self._patience
            if is_long and (yield Read(f"closed.{_block(number)}")) is not None:
                return None  # the others have gone on
            if are_enough:
                text = json.dumps({"members": fit, "facts": self._told, "holds": self.holds})
                decided = yield Create(f"{number}.quorum", text)
                break
            yield Wait(now - since)
        quorum = json.loads(decided)
        if quorum["holds"] == [*self.holds] and not self._heir_of:
            self._keeps = True  # an heir cannot know who else has gone on from its checkpoint
        return dict(quorum)

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
        if self._mine is not None and (self._mine[0], self._mine[2]) == (self._next, came):
            return
        slot = len(self._came.get(self._next, ())) + 1
        text = json.dumps(came._asdict())
        while (yield Create(f"{self._next}.came.{slot}", text)) != text:
            slot += 1
        self._mine = self._next, slot, came

    def _look(self, number: int) -> Run[None]:
        """Learn who has come to an attempt."""
        came = self._came.setdefault(number, [])
        while (text := (yield Read(f"{number}.came.{len(came) + 1}"))) is not None:
            came.append(Came(**json.loads(text)))

    def _last(self, number: int) -> Run[dict[int, Came]]:
        """Return what each island that has come to an attempt has told last."""
        yield from self._look(number)
        return {one.island: one for one in self._came[number]}

    def _fitting(self, last: dict[int, Came]) -> list[int]:
        """Return islands that hold the same as this one and have reached one another, by rank."""
        replaced = self._replaced(last)
        fit = [
            one
            for one in last.values()
            if (one.holds, one.facts) == (self.holds, last[self.island].facts)
            and one.island not in replaced
        ]
        pairs = {(one.island, other) for one in fit for other in one.apart}
        pairs |= {(other, one) for one, other in pairs}
        chosen: list[Came] = []
        for one in sorted(fit, key=lambda one: (_count(pairs, one), one.order, one.island)):
            if all((one.island, other.island) not in pairs for other in chosen):
                chosen.append(one)
        return [one.island for one in sorted(chosen, key=lambda one: (one.order, one.island))]

    def _replaced(self, last: dict[int, Came]) -> dict[int, int]:
        """Return who has gone on in an island's place, and holds no less, as it has heard."""
        by_key = {f"{self.place}.{one.island}": one for one in last.values()}
        pairs = (
            (by_key[key], one) for one in last.values() for key in one.heir_of if key in by_key
        )
        return {
            one.island: heir.island
            for one, heir in pairs
            if heir is not one and heir.island not in one.apart
            if (heir.at, heir.steps) >= (one.at, one.steps)
        }

    def _ahead(self, last: dict[int, Came]) -> set[int]:
        """Return those who hold what this island has to take over before the run begins."""
        if (mine := last.get(self.island)) is None:
            return set()
        more = {
            one.island
            for one in last.values()
            if one.facts == mine.facts and not one.at and one.steps > self.steps
        }
        heirs = {self._replaced(last).get(self.island, 0)} - {0}
        return (more | heirs) - {*mine.apart}

    def _are_enough(
        self, last: dict[int, Came], fit: list[int], now: float, waited: float
    ) -> Run[bool]:
        """Return whether those who have come take part without those who have not."""
        if not self._latest:
            if len(fit) >= self._least:
                return True
            longest = (LONGEST if self._apart else _LONGEST_BEGIN) * self._patience
            if waited > longest:
                raise CommunicationError(
                    f"a run begins with {self._least} islands that reach one another; in"
                    f" {longest:g} s islands {sorted(last)} have come {self._why()}"
                )
            return False
        failed = self._outcomes.get(self._next - 1) == _ABORT
        patience = min(self._patience, _GRACE_SECONDS) if failed else self._patience
        if waited > patience:
            return True
        missing = {*self._members}.union(*(one.brings for one in last.values())) - {*last}
        gone: set[int] = (yield Gone()) if missing else set()
        if missing <= gone:
            return True
        return missing <= gone | (yield from self._silent(missing - gone, now))

    def _silent(self, islands: Iterable[int], now: float) -> Run[set[int]]:
        """Return those of these islands that have given no sign of life for long."""
        for one in sorted(islands):
            watch = self._watches.setdefault(one, Watch(self._beat))
            if watch.is_due(now):
                watch.hear((yield Signs(one)))
        return {one for one in islands if self._watches[one].quiet >= self._silence}

    def _check_state(self, mine: Came, last: dict[int, Came]) -> None:
        alike = (one for one in last.values() if (one.facts, one.at) == (mine.facts, 0))
        first = next(one for one in alike if one.steps == self.steps)
        if first.state != self.state:
            raise MismatchError(
                f"this island has other parameters to begin with than island {first.island}; start"
                " all from one seed, or from checkpoints of one run"
            )

    def _wait_for_outcome(self, members: list[int]) -> Run[None]:
        """Wait for the outcome of an attempt of others, as long as one of them lives."""
        since, waited, self._watches = (yield Now()), 0.0, {}
        while not (yield from self._is_over(self._next, waited)):
            now = yield Now()
            waited = now - since
            silent = yield from self._silent(members, now)
            if {*members} <= silent and waited > 3 * self._patience:
                yield Create(f"{self._next}.outcome", _ABORT)
            yield Wait(waited)

    def _find_next(self) -> Run[None]:
        """Learn which attempt is the next, and which was the latest that took effect."""
        self._closed = yield from _first_missing("closed.{}", self._closed)
        if self._closed * BLOCK >= self._next:
            self._next = self._closed * BLOCK + 1
            self._latest = max(map(int, (yield from self._summed_up(self._closed - 1))))
        while (outcome := (yield from self._outcome(self._next))) is not None:
            self._outcomes[self._next] = outcome
            if outcome == _COMMIT:
                self._latest = self._next
            self._next += 1
        self._outcomes = {
            one: what for one, what in self._outcomes.items() if one >= self._next - 1
        }

    def _is_over(self, number: int, waited: float) -> Run[bool]:
        """Return whether an attempt has an outcome, which may have been summed up long since."""
        if (yield Read(f"{number}.outcome")) is not None:
            return True
        return waited > self._patience and (yield Read(f"closed.{_block(number)}")) is not None

    def _outcome(self, number: int) -> Run[str | None]:
        """Return the outcome of an attempt, of which the place is told if it has forgotten it."""
        known: str | None = self._outcomes.get(number)
        if known is None:
            known = yield Read(f"{number}.outcome")
        elif (yield Create(f"{number}.outcome", known)) != known:
            raise self._forgotten(number)
        return known

    # To join and to return.

    def take_over(self, others: Sequence[int] = ()) -> Run[bool | None]:
        """Get what islands share; return whether what this island has moved may be kept.

        None if nothing is taken over: the islands that could send it give no signs of life, which
        are these others, or those that hold more before the run begins.

        Raises
        ------
        CommunicationError
            When no island that holds it sends it.
        """
        now, waited, self._watches = (yield Now()), 0.0, {}
        yield from self._find_next()
        while waited <= LONGEST * self._patience:
            before, now = now, (yield Now())
            waited += min(now - before, self._patience)  # it may have stood still
            # Members host those who came to an attempt before theirs, too, but not to begin.
            earlier = 1 if self._latest else 0
            if self._mine is None or self._mine[0] + earlier < self._next:
                yield from self._come(now)
            assert self._mine is not None
            name = f"{self._mine[0]}.host.{self._mine[1]}"
            if (host := (yield Read(name))) is not None:
                got = yield Receive(int(host), name)
                if isinstance(got, tuple):
                    return (yield from self._taken(*got))
                yield from self._keep_apart([int(host)], got)
                yield from self._find_next()  # the others may have gone on meanwhile
                self._mine = None
            elif (yield from self._is_over(self._mine[0] + earlier, waited)):
                yield from self._find_next()
                if self._mine[0] + earlier < self._next:
                    continue
            elif others or not self._latest:
                hosts = {*others} or self._ahead((yield from self._last(self._next)))
                if hosts <= (yield from self._silent(hosts, now)):
                    if not self._latest:  # the run may begin without them
                        yield from self._keep_apart([*hosts], "it gives no sign of life")
                    return None
            yield Wait(waited)
        raise CommunicationError(
            f"no island has sent what the run shares in {waited:.0f} s, so there is nobody to join"
            f" {self._why()}; if all have ended, load checkpoints at another place"
        )

    def welcome(self) -> Run[None]:
        """After an outer step: host islands that are behind, and remove what nobody needs."""
        for number in (self.at - 1, self.at, self.at + 1):
            yield from self._look(number)
            yield from self._welcome(number, {*self._members})
        former = [number for number in self._came if number < self.at - 1]
        came = [(number, slot + 1) for number in former for slot in range(len(self._came[number]))]
        self._came = {one: who for one, who in self._came.items() if one not in former}
        if self._members[0] == self.island:
            yield Remove([f"{n}.{what}.{slot}" for n, slot in came for what in ("came", "host")])
            yield from self._sum_up()
        self._hosted -= {f"{number}.host.{slot}" for number, slot in came}

    def _welcome(self, number: int, hosts: set[int]) -> Run[None]:
        """Host those who came to an attempt and are behind, if it is this island's turn."""
        came = self._came[number]
        slots = {one.island: slot for slot, one in enumerate(came, 1)}
        replaced = set() if self.at else self._replaced({one.island: one for one in came})
        # Who was not behind at the attempt before the last has come anew since, or is dead.
        held = [(one.at, one.steps) for one in came]
        newest = max(held) if number < self.at and held else (self.at, self.steps)
        for slot, guest in enumerate(came, 1):
            is_behind = (guest.at, guest.steps) < newest or guest.island in replaced
            if guest.island in self._members or not is_behind or slots[guest.island] != slot:
                continue
            turns = sorted(one for one in hosts if one not in guest.apart and one != guest.island)
            name = f"{number}.host.{slot}"
            if self.at and (not turns or turns[slot % len(turns)] != self.island):
                continue
            if (self.at and guest.island in self._brings) or name in self._hosted:
                continue
            if (yield Create(name, f"{self.island}")) == f"{self.island}":
                self._brings.append(guest.island)
                self._hosted.add(name)
                yield Host(guest.island, name)

    def _taken(self, at: int, steps: int, state: str) -> Run[bool]:
        kept = self._keeps
        if (yield Read(f"heir.{self._key}")) is not None:  # which has what this one has moved
            kept, self._lives = False, self._lives + 1
            yield from self._take_number()
        self.at, self.steps, self.state, self._keeps = at, steps, state, True
        self._members, self._brings, self._heir_of, self._mine = [], [], [], None
        self.origin = self.place, self.island, at
        if at:
            self._members = (yield from self._quorum(at))["members"]
        return kept

    def is_awaited(self) -> Run[bool]:
        """Return whether others wait for this island, or have gone on without it."""
        yield from self._find_next()
        if self.at != self._latest:
            return True
        return (yield Read(f"{self._next}.came.1")) is not None

    def _quorum(self, number: int) -> Run[dict[str, Any]]:
        text = yield Read(f"{number}.quorum")
        return dict(json.loads(text)) if text else {"members": [], "facts": self._told}

    @staticmethod
    def _forgotten(number: int) -> CommunicationError:
        return CommunicationError(
            f"the place where islands meet has forgotten attempt {number}, and others have decided"
            " otherwise since; load the last checkpoints at another place"
        )

    def _why(self) -> str:
        """Return why islands were not reached."""
        return "".join(f"(island {one}: {why})" for one, (_, _, why) in self._apart.items())

    def _keep_apart(self, islands: Sequence[int], why: str) -> Run[None]:
        now = yield Now()
        for one in islands:
            times = self._apart.get(one, (0,))[0]
            until = now + self._patience * min(2**times, _MOST_APART)
            self._apart[one] = times + 1, until, why

    def _sum_up(self) -> Run[None]:
        """Sum up a block of outcomes, if two more have followed."""
        if self.at <= (self._closed + 3) * BLOCK:
            return
        numbers = range(self._closed * BLOCK + 1, (self._closed + 1) * BLOCK + 1)
        commits = yield from self._summed_up(self._closed - 1)
        commits = {key: commits[key] for key in [max(commits, key=int)]}
        for number in numbers:
            if (yield Read(f"{number}.outcome")) == _COMMIT:
                commits[f"{number}"] = (yield from self._quorum(number))["members"]
        yield Create(f"closed.{self._closed}", json.dumps(commits))
        yield Remove([f"{one}.{what}" for one in numbers for what in ("quorum", "outcome")])
        self._closed += 1

    def _summed_up(self, block: int) -> Run[dict[str, list[int]]]:
        """Return who took part in a block's attempts that took effect, and in the last before."""
        text = yield Read(f"closed.{block}")
        return dict(json.loads(text)) if text else {"0": []}


def _block(number: int) -> int:
    return (number - 1) // BLOCK


def _count(pairs: set[tuple[int, int]], came: Came) -> int:
    return sum(one == came.island for one, _ in pairs)


def _first_missing(key: str, known: int) -> Run[int]:
    """Return the first number from ``known`` on whose key is not there; all before it are."""
    step = 1
    while (yield Read(key.format(known + step - 1))) is not None:
        known, step = known + step, 2 * step
    while step > 1:
        step //= 2
        if (yield Read(key.format(known + step - 1))) is not None:
            known += step
    return known
