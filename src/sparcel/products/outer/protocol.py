"""How islands agree who takes part in an outer step, and whether it takes effect.

An island's part is a state machine: generators that yield what is to be done, and are sent what
came of it. No socket, clock, thread or store is in it; `sparcel.products.outer.islands` drives it.

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

from collections.abc import Sequence
from typing import NamedTuple

from sparcel.errors import CommunicationError
from sparcel.products.outer.history import (
    ABORT,
    COMMIT,
    Create,
    Gone,
    Host,
    Now,
    Quorum,
    Read,
    Receive,
    Remove,
    Run,
    Wait,
    forgotten,
)
from sparcel.products.outer.presence import Came, Presence, ahead, fitting, name_of, replaced

_GRACE_SECONDS = 3.0
"""How long islands are waited for that may have failed with the last attempt."""

LONGEST, _LONGEST_BEGIN = 10, 60
"""For how many times the patience an island waits for what it needs, and for others to begin."""


class Attempt(NamedTuple):
    """An attempt at an outer step: its number, and the islands that take part, by rank."""

    number: int
    members: list[int]


class Protocol(Presence):
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
    """

    def __init__(
        self, nonce: str, facts: dict[str, str], layout: str, least: int, patience: float
    ) -> None:
        super().__init__(nonce, facts, layout, patience)
        self._least = least
        self._members: list[int] = []
        self._attempt = Attempt(0, [])
        self._began: float | None = None
        """Since when this island waits for the run to begin."""
        self._missed: float | None = None
        """Since when attempts to begin have failed."""
        self._returned = False
        """Whether it goes on from a checkpoint of what was shared here last."""
        self._hosted: set[str] = set()
        """The names under which this island has hosted others, each once."""
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
        yield from self._history.look()
        if (quorum := (yield from self._history.quorum(self._history.latest))) is not None:
            yield from self._check_facts(quorum.facts)
        yield from self._take_number()
        if self._history.latest:
            yield from self.take_over(quorum.members if quorum else ())
        if not self.at:
            yield from self._check_ended()  # the others may have, meanwhile
        return self.at > 0

    def resume(self, place: str, island: int, order: int, at: int) -> Run[None]:
        """Go on from a checkpoint, in the place of the island that has written it."""
        former = name_of(place, island)
        has_heir = (yield Read(f"heir.{self._key}")) is not None
        if has_heir or former == self._key or not self._is_new:
            self._lives += 1  # so that no heir is one of its own heirs
            yield from self._take_number()
        self.at, self.order, self._keeps = (at if place == self.place else 0), order, False
        self.origin = place, island, at
        if self.at and self.at == self._history.latest:
            quorum = yield from self._history.quorum(at)
            self._members, self._returned = quorum.members if quorum else [], True
        self._heir_of, self._is_new = [former], False
        while (heir := (yield Create(f"heir.{self._heir_of[-1]}", self._key))) != self._key:
            self._heir_of.append(heir)

    # To meet.

    def meet(self) -> Run[Attempt | None]:
        """Wait for the others; return the attempt in which this island takes part.

        None if the run has gone on without it, or will begin with what others hold.
        """
        while True:
            yield from self._history.look()
            if self.at != self._history.latest:
                return None
            if (yield Create(f"island.{self.island}", self._own)) != self._own:
                yield from self._take_number()  # the place has forgotten this island
            quorum = yield from self._agree()
            if quorum is None:
                return None
            if self.island not in quorum.members:
                yield from self._wait_for_outcome(quorum.members)
            elif quorum.holds == [*self.holds]:
                self._attempt = Attempt(self._history.next, quorum.members)
                return self._attempt
            else:  # this island has taken over what others hold since it came
                yield Create(f"{self._history.next}.outcome", ABORT)

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
        proposed = COMMIT if arrived else ABORT
        if (yield from self._history.decide(number, members, proposed)) == ABORT:
            yield from self._keep_apart(apart, why)
            if apart and self._missed is None:
                self._missed = yield Now()
            return False
        if not held:
            raise forgotten(number)
        self._hold(number, self.steps + 1, members)
        self._is_new = False
        for one in members:
            self._apart.pop(one, None)
        return True

    def _hold(self, at: int, steps: int, members: list[int]) -> None:
        """Begin with what was shared after an attempt of these members."""
        self.at, self.steps, self._members = at, steps, members
        self.origin = self.place, self.island, at
        self._keeps, self._returned, self._brings, self._heir_of = True, False, [], []

    def _agree(self) -> Run[Quorum | None]:
        """Wait until it is decided who takes part in the next attempt; None as `meet`."""
        number, since = self._history.next, (yield Now())
        if self._history.latest:
            self._watches.clear()
        elif self._began is None:
            self._began = since
        while (quorum := (yield from self._history.quorum(number))) is None:
            now = yield Now()
            yield from self._come(now)
            last = yield from self._last(number)
            mine = last.get(self.island)
            if mine is None or mine.holds != self.holds:  # the others have gone on, and removed it
                return None
            if not self.at:  # until the run begins, those who came and died do not count
                for one in (yield from self._silent({*last} - {self.island}, now)):
                    del last[one]
                if ahead(last, self.place, self.island):
                    return None
                yield from self._check_living(last)
                behind = {one for one, _ in replaced(last, self.place)}
                yield from self._welcome(number, {*last}, behind)
            fit = fitting(last, self.place, self.island)
            are_enough = yield from self._are_enough(last, fit, now, now - since)
            is_long = are_enough or now - since > self._patience
            if is_long and (yield from self._history.is_summed_up(number)):
                return None  # the others have gone on
            if are_enough:
                proposed = Quorum(fit, self._told, [*self.holds])
                quorum = yield from self._history.propose(number, proposed)
                break
            yield Wait(now - since)
        if quorum.holds == [*self.holds] and not self._heir_of:
            self._keeps = True  # an heir cannot know who else has gone on from its checkpoint
        return quorum

    def _are_enough(
        self, last: dict[int, Came], fit: list[int], now: float, waited: float
    ) -> Run[bool]:
        """Return whether those who have come take part without those who have not."""
        if not self._history.latest:
            if len(fit) >= self._least:
                return True
            self._check_begins(now, last)
            return False
        patience = self._patience
        if self._history.has_failed and not self._returned:
            patience = min(patience, _GRACE_SECONDS)
        if waited > patience:
            return True
        missing = {*self._members}.union(*(one.brings for one in last.values())) - {*last}
        if self._returned:  # the others may have stopped, too, and come back under other numbers
            names = {name for one in last.values() for name in one.heir_of}
            missing = {one for one in missing if name_of(self.place, one) not in names}
            if missing.intersection(self._members):
                return False
        gone: set[int] = (yield Gone()) if missing else set()
        if missing <= gone:
            return True
        return missing <= gone | (yield from self._silent(missing - gone, now))

    def _check_begins(self, now: float, last: dict[int, Came]) -> None:
        """Check that this island has not waited for the run to begin for too long."""
        since, times = self._began, _LONGEST_BEGIN
        if self._apart.keys() & last.keys():
            since, times = self._missed, LONGEST
        if now - (since or now) > times * self._patience:
            raise CommunicationError(
                f"a run begins with {self._least} islands that reach one another; in"
                f" {times * self._patience:g} s islands {sorted(last)} have come{self._why()}"
            )

    def _wait_for_outcome(self, members: list[int]) -> Run[None]:
        """Wait for the outcome of an attempt of others, as long as one of them lives."""
        since, waited = (yield Now()), 0.0
        self._watches.clear()
        while not (yield from self._history.is_over(self._history.next, waited > self._patience)):
            now = yield Now()
            waited = now - since
            silent = yield from self._silent(members, now)
            if {*members} <= silent and waited > 3 * self._patience:
                yield Create(f"{self._history.next}.outcome", ABORT)
            yield Wait(waited)

    # To join and to return.

    def take_over(self, others: Sequence[int] = ()) -> Run[bool | None]:
        """Get what islands share; return whether what this island has moved may be kept.

        None if nothing is taken over: all of ``others`` are silent; or, before the run begins, all
        are whose checkpoint goes before this island's, or an attempt to begin has been made.

        Raises
        ------
        CommunicationError
            When no island that holds it sends it.
        """
        now, waited, is_asked_again = (yield Now()), 0.0, False
        yield from self._history.look()
        if self._history.latest:
            self._watches.clear()
        while waited <= LONGEST * self._patience:
            before, now = now, (yield Now())
            waited += min(now - before, self._patience)  # it may have stood still
            is_long = waited > self._patience
            # Members host those who came to an attempt before theirs, too, but not to begin.
            earlier = 1 if self._history.latest else 0
            if self._mine is None or self._mine[0] + earlier < self._history.next:
                yield from self._come(now)
            assert self._mine is not None
            name = f"{self._mine[0]}.host.{self._mine[1]}"
            if (host := (yield Read(name))) is not None:
                got = yield Receive(int(host), name)
                if isinstance(got, tuple):
                    return (yield from self._taken(*got))
                if is_asked_again or self._history.latest:
                    yield from self._keep_apart([int(host)], got)
                is_asked_again = True  # before the run begins the host may have waited in vain
                yield from self._history.look()  # the others may have gone on meanwhile
                self._mine = None
            elif (yield from self._history.is_over(self._mine[0] + earlier, is_long)):
                yield from self._history.look()
                if self._mine[0] + earlier < self._history.next:
                    continue
            elif (yield from self._waits_in_vain(others, now)):
                return None
            yield Wait(waited)
        raise CommunicationError(
            f"no island has sent what the run shares in {waited:.0f} s, so there is nobody to join"
            f"{self._why()}; if all have ended, load checkpoints at another place"
        )

    def _waits_in_vain(self, others: Sequence[int], now: float) -> Run[bool]:
        """Return whether nobody will send what is shared: see `take_over`."""
        if self._history.latest and not others:
            return False
        number = self._history.next
        hosts = {*others} or ahead((yield from self._last(number)), self.place, self.island)
        if hosts <= (yield from self._silent(hosts, now)):
            return True
        # Those it waits for may wait for an attempt to begin, and that for this island.
        return not others and (yield from self._history.quorum(number)) is not None

    def welcome(self) -> Run[None]:
        """After an outer step: host islands that are behind, and remove what nobody needs."""
        for number in (self.at - 1, self.at, self.at + 1):
            yield from self._look(number)
            yield from self._welcome(number, {*self._members}, set())
        former = [number for number in self._came if number < self.at - 1]
        came = [(number, slot + 1) for number in former for slot in range(len(self._came[number]))]
        self._came = {one: who for one, who in self._came.items() if one not in former}
        if self._members[0] == self.island:
            yield Remove([f"{n}.{what}.{slot}" for n, slot in came for what in ("came", "host")])
            yield from self._history.sum_up(self.at)
        self._hosted -= {f"{number}.host.{slot}" for number, slot in came}

    def _welcome(self, number: int, hosts: set[int], behind: set[int]) -> Run[None]:
        """Host those who came to an attempt and are behind, if it is this island's turn.

        ``behind`` are islands to host although they hold as much as others.
        """
        came = self._came[number]
        slots = {one.island: slot for slot, one in enumerate(came, 1)}
        # Who was not behind at the attempt before the last has come anew since, or is dead.
        held = [(one.at, one.steps) for one in came]
        newest = max(held) if number < self.at and held else (self.at, self.steps)
        for slot, guest in enumerate(came, 1):
            is_behind = (guest.at, guest.steps) < newest or guest.island in behind
            is_former = guest.island in self._members or slots[guest.island] != slot
            if is_former or not is_behind or self.island in guest.apart:
                continue
            turns = sorted(one for one in hosts if one not in guest.apart and one != guest.island)
            is_others = self.at and turns[slot % len(turns)] != self.island
            name = f"{number}.host.{slot}"
            if is_others or guest.island in self._brings or name in self._hosted:
                continue
            if (yield Create(name, f"{self.island}")) == f"{self.island}":
                if self.at:
                    self._brings.append(guest.island)
                self._hosted.add(name)
                yield Host(guest.island, name)

    def _taken(self, at: int, steps: int, state: str) -> Run[bool]:
        kept = self._keeps
        if (yield Read(f"heir.{self._key}")) is not None:  # which has what this one has moved
            kept, self._lives = False, self._lives + 1
            yield from self._take_number()
        self.state, self._mine = state, None
        quorum = (yield from self._history.quorum(at)) if at else None
        self._hold(at, steps, quorum.members if quorum else [])
        return kept

    def is_awaited(self) -> Run[bool]:
        """Return whether others wait for this island, or have gone on without it."""
        yield from self._history.look()
        if self.at != self._history.latest:
            return True
        return (yield Read(f"{self._history.next}.came.1")) is not None
