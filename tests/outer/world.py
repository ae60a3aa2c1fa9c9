"""A world in which islands run `outer.protocol`, as a seed has it: time, place and links.

Nothing in it waits. An island trains by counting: each inner step is a name, parameters are the set
of names that have been counted, and what an island has moved, or its memory owes, are sets, too. So
a name that is counted twice, or lost where nobody was told, is seen at once.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple
from unittest.mock import patch

from sparcel.errors import SparcelError
from sparcel.products.outer import history
from sparcel.products.outer.protocol import LONGEST, Attempt, Protocol

PATIENCE = 10.0
SETTLED = 40 * PATIENCE
"""So long after the last fault, at most, all islands that are there go on together."""

MOST = 7
"""How many islands there are at once, at most."""

Names = frozenset[str]
NONE: Names = frozenset()
Keys = dict[str, tuple[str, float]]  # texts, and when they were created


class Exchange(NamedTuple):
    """Exchange what this island has moved; the answer is an `Arrived`."""

    attempt: Attempt


class Train(NamedTuple):
    """Let time go by."""

    seconds: float


class Arrived(NamedTuple):
    """What came of an exchange: whether all have heard of all, this one has, and who is apart."""

    all: bool
    here: bool = True
    apart: list[int] = []  # noqa: RUF012


class Held(NamedTuple):
    """What islands share: all that was counted, and what sums up how it came about."""

    counted: Names = NONE
    digest: int = 0


@dataclass
class Checkpoint:
    """What an island saves."""

    numbers: tuple[str, int, int, int]
    steps: int
    shared: Held
    moved: Names
    memory: Names


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


class Spans:
    """When something stood still, or was down: one time after the other."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    @property
    def until(self) -> float:
        """When the last one ends."""
        return self.times[-1][1] if self.times else 0.0

    def begin(self, now: float, until: float) -> None:
        self.end(now)
        self.times.append((now, until))

    def end(self, now: float) -> None:
        if self.until > now:
            self.times[-1] = self.times[-1][0], now

    def before(self, time: float) -> float:
        """Return when one began that lasted at a time, or that time."""
        return next((since for since, until in self.times if since < time < until), time)


class Island:
    """An island's process, which counts names as `sparcel.products.outer.driver` moves tensors."""

    def __init__(self, world: World, name: str, saved: Checkpoint | None) -> None:
        self.world, self.name, self.saved = world, name, saved
        chance = world.chance
        self.every, self.inner_s = chance.randint(1, 3), chance.uniform(0.3, 2.0)
        facts = {"layout": "1", "settings": "1"}
        self.mine = world.make(f"{chance.getrandbits(60)}", facts, "", world.least, PATIENCE)
        self.steps, self.clock, self.visiting = 0, 0, False
        self.shares = False  # whether all that it has moved began with what is shared here
        self.shared, self.moved, self.memory = Held(), NONE, NONE
        self.trained: set[str] = set()
        self.dropped: set[str] = set()
        self.connected: dict[int, Island] = {}
        self.born, self.still = world.now, Spans()
        self.ended: str | None = None
        self.committed: list[tuple[float, int]] = []
        self.checkpoints: list[Checkpoint] = []
        self.doing = self.life()

    def life(self) -> Generator[Any, Any, None]:
        """Do what the driver does."""
        joined = yield from self.mine.enter()
        if joined:
            self.receive()
        self.begin()
        if self.saved is not None:
            yield from self.load(self.saved, joined)
        while True:
            yield Train(self.inner_s)
            name = f"{self.name}.{len(self.trained)}"
            self.trained.add(name)
            self.moved |= {name}
            self.clock += 1
            due = self.clock >= (self.steps + 1) * self.every
            if due or (self.visiting and (yield from self.mine.is_awaited())):
                self.visiting = False
                yield from self.step()
            if self.world.chance.random() < 0.3:
                self.save()

    def step(self) -> Generator[Any, Any, None]:
        """Take an outer step, or find out that the others have."""
        while (attempt := (yield from self.mine.meet())) is not None:
            arrived = yield Exchange(attempt)
            if (yield from self.mine.decide(arrived.all, arrived.here, arrived.apart, "cut")):
                self.world.commit(self, attempt)
                yield from self.mine.welcome()
                return
        yield Train(self.world.overlap * self.inner_s)
        kept = yield from self.mine.take_over()
        if kept is None:
            return
        if not kept:
            self.drop()
        self.receive()

    def receive(self) -> None:
        self.shared, self.steps = self.world.given.pop(self.name), self.mine.steps
        self.shares = True
        self.clock, self.visiting = self.steps * self.every, True
        self.world.check(self)

    def drop(self) -> None:
        pending, world = self.moved | self.memory, self.world
        if self.shares and pending and not world.forgets and not world.is_copied(self):
            raise BrokenPromiseError(f"{self.name} is to drop what it alone has")
        self.dropped |= pending
        self.moved = self.memory = NONE

    def begin(self) -> None:
        self.mine.steps, self.mine.state = self.steps, f"{self.shared.digest:x}"

    def load(self, saved: Checkpoint, joined: bool) -> Generator[Any, Any, None]:
        place, _, _, at = saved.numbers
        if joined and (place, at) != (self.mine.place, self.mine.at):
            return
        yield from self.mine.resume(*saved.numbers)
        self.steps, self.shared = saved.steps, saved.shared
        self.moved, self.memory, self.shares = saved.moved, saved.memory, False
        self.clock = self.steps * self.every
        self.begin()
        self.world.check(self)

    def save(self) -> None:
        mine = self.mine
        place, island, at = mine.origin
        numbers = place, island, mine.order, at
        now = Checkpoint(numbers, self.steps, self.shared, self.moved, self.memory)
        self.checkpoints.append(now)


@dataclass
class Meeting:
    """The members of an attempt that have begun to exchange, with what each sends and keeps."""

    members: list[int]
    there: dict[int, Island] = field(default_factory=dict)
    sends: dict[int, Names] = field(default_factory=dict)
    outcome: Held | None = None
    over: bool = False


class World:
    """The world of a seed.

    Parameters
    ----------
    seed
        What decides everything.
    make
        Makes an island's part; tests plant faults in it.
    forgets
        Whether the place may lose the last second when it restarts.
    """

    def __init__(
        self, seed: int, make: Callable[..., Protocol] = Protocol, forgets: bool = False
    ) -> None:
        self.chance, self.make, self.forgets = random.Random(seed), make, forgets
        self.least, self.pause = self.chance.choice([1, 2, 2, 2, 3]), self.chance.choice([0.1, 0.3])
        """How many islands begin, and seconds between two looks at first."""
        self.overlap = self.chance.choice([0, 0, 0, 4])
        """How many inner steps go by until an island takes over what it has heard of."""
        self.now, self._number = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.keys: Keys = {}
        self.islands: list[Island] = []
        self.given: dict[str, Held] = {}
        self.story: list[str] = []
        self._meetings: dict[tuple[int, tuple[int, ...]], Meeting] = {}
        self._hosted: dict[str, tuple[Island, tuple[int, int, str], Held, float]] = {}
        self._commits: dict[int, int] = {}
        self._cut: dict[frozenset[Island], float] = {}
        self._lost: dict[Island, float] = {}
        """When an island last missed a part of what it was to take over."""
        self._down, self.calm = Spans(), False
        self.apart: list[Island] = []

    # Time.

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, then))

    def run(self, until: float) -> None:
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, then = heapq.heappop(events)
            then()
        self.now = until

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now:8.2f}  {what}")

    # Islands.

    def start(self, name: str, saved: Checkpoint | None = None) -> Island:
        island = Island(self, name, saved)
        self.islands.append(island)
        self.tell(f"{name} begins" + (f" from step {saved.steps}" if saved else ""))
        self.resume(island, None)
        return island

    def stop(self, island: Island, seconds: float) -> None:
        island.still.begin(self.now, self.now + seconds)
        self.tell(f"{island.name} stands still for {seconds:.1f} s")

    def kill(self, island: Island) -> None:
        island.ended = "killed"
        self.tell(f"{island.name} is killed")

    def resume(self, island: Island, answer: object) -> None:
        """Let an island go on with an answer, now or when it stands still no longer."""
        if island.ended:
            return
        if (still := island.still.until - self.now) > 0:
            self.after(min(still, 2.0), lambda: self.resume(island, answer))
            return
        try:
            action = island.doing.send(answer)
            while isinstance(action, history.Now):
                action = island.doing.send(self.now)
        except SparcelError as error:
            island.ended = f"{type(error).__name__}: {error}"
            self.tell(f"{island.name} fails: {error}")
            self._check_failure(island)
            return
        self._do(island, action)

    def _do(self, island: Island, action: object) -> None:
        chance, again = self.chance, lambda answer: self.resume(island, answer)
        match action:
            case history.Create() | history.Read() | history.Remove() | history.Signs():
                self._request(island, action, self.now)
            case history.Wait(waited):
                self.after(min(max(self.pause, 0.3 * waited), 2.0), lambda: again(None))
            case Train(seconds):
                self.after(seconds * chance.uniform(0.9, 1.3), lambda: again(None))
            case history.Gone():
                gone = {n for n, one in island.connected.items() if one.ended}
                self.after(0.0, lambda: again(gone))
            case history.Host(_, name):
                self._hosted[name] = island, island.mine.holds, island.shared, self.now
                self.after(0.0, lambda: again(None))
            case history.Receive(_, name):
                self._receive(island, name, self.now + PATIENCE)
            case Exchange(attempt):
                self._exchange(island, attempt)
            case _:
                raise TypeError(action)

    def _check_failure(self, island: Island) -> None:
        """Check that an island has failed only where no other could have sent it anything."""
        if "a run begins with" in str(island.ended) and self.now - island.born < LONGEST * PATIENCE:
            raise BrokenPromiseError(f"{island.name} gives up soon")
        if "nobody to join" not in str(island.ended) or self.forgets:
            return
        if ("commit", "outcome") not in {
            (text, key.partition(".")[2]) for key, (text, _) in self.keys.items()
        }:
            raise BrokenPromiseError(f"{island.name} found nobody to begin with")
        since = self.now - 0.6 * LONGEST * PATIENCE
        cut = [until for pair, until in self._cut.items() if island in pair]
        if max(cut, default=0.0) > since or self._lost.get(island, 0.0) > since:
            return
        others = [one for one in self.islands if self._is_up(one)]
        if any(sum(time > since for time, _ in one.committed) > 4 for one in others):
            raise BrokenPromiseError(f"{island.name} found nobody to join")

    def is_copied(self, island: Island) -> bool:
        """Tell whether another may have what an island has moved, from a checkpoint of it."""
        mine, found = island.mine, self.keys.items()
        own = [key for key, (text, _) in found if text.startswith(f"{mine._nonce}.")]
        return any(f"heir.{mine.place}.{key.removeprefix('island.')}" in self.keys for key in own)

    def _is_up(self, island: Island) -> bool:
        """Tell whether an island's process runs."""
        return not island.ended and island.still.until <= self.now

    def _sign(self, island: Island) -> str:
        """Return the last sign of life that an island has given, at a time of its own."""
        if island.ended:
            return island.name
        beat = history.beat_seconds(PATIENCE)
        number = (self.now - island.born) // beat
        while number:
            time = island.born + number * beat
            if (since := min(island.still.before(time), self._down.before(time))) == time:
                break
            number = max(min(number - 1, (since - island.born) // beat), 0)
        return f"{island.name} {number}"

    # The place.

    def _request(self, island: Island, action: Any, since: float) -> None:
        """Send a request, which may be lost, or come late, or twice, or its answer be lost."""
        chance = self.chance
        is_quick, fate = self.calm or chance.random() < 0.95, chance.random()
        delay = chance.expovariate(20.0) if is_quick else chance.uniform(0.1, 3.0)
        if self.calm:
            fate = 0.5
        self.after(delay, partial(self._come, island, action, self.keys, since, fate))
        if isinstance(action, history.Create) and fate > 0.99:  # it comes once more, much later
            later = chance.uniform(0.0, 10 * PATIENCE)
            self.after(later, partial(self._answer, self.keys, action))

    def _come(self, island: Island, action: Any, keys: Keys, since: float, fate: float) -> None:
        """Answer a request that has come to the place, unless it is down, or something is lost."""
        if island.ended and fate > 0.5:
            return
        is_lost = self.now < self._down.until or fate < 0.01
        answer = None if is_lost else self._answer(keys, action)
        if is_lost or fate < 0.02:  # what was lost is the answer
            self.after(1.0, partial(self._ask_again, island, action, since))
        else:
            self.resume(island, answer)

    def _ask_again(self, island: Island, action: Any, since: float) -> None:
        if island.ended:
            return
        if self.now - since > LONGEST * PATIENCE:
            island.ended = "the place does not answer"
            self.tell(f"{island.name} fails: the place does not answer")
        else:
            self._request(island, action, since)

    def _answer(self, keys: Keys, action: Any) -> str | None:
        match action:
            case history.Create(key, text):
                return keys.setdefault(key, (text, self.now))[0]
            case history.Read(key):
                return keys.get(key, (None,))[0]
            case history.Remove(gone):
                for key in gone:
                    keys.pop(key, None)
            case history.Signs(number):
                return "".join(self._sign(one) for one in self.islands if one.mine.island == number)
        return None

    def restart(self, seconds: float) -> None:
        """Let the place be down for a while, and lose the last second if it is one that may."""
        self._down.begin(self.now, self.now + seconds)
        lost = [key for key, (_, at) in self.keys.items() if self.forgets and at > self.now - 1.0]
        for key in lost:
            del self.keys[key]
        self.tell(f"the place is down for {seconds:.1f} s, and has lost {lost}")

    # Links.

    def cut(self, one: Island, other: Island, seconds: float) -> None:
        self._cut[frozenset((one, other))] = self.now + seconds
        self.tell(f"{one.name} and {other.name} do not reach each other for {seconds:.0f} s")

    def reach(self, one: Island, other: Island) -> bool:
        return self._cut.get(frozenset((one, other)), 0.0) <= self.now

    def _receive(self, island: Island, name: str, until: float) -> None:
        """Receive from a host that has begun, or will within the patience."""
        found = self._hosted.get(name)
        waits = found and self.now <= found[3] + PATIENCE
        if found and waits and self.reach(island, found[0]) and self._is_up(found[0]):
            _, holds, held, _ = found
            is_lost = not self.calm and self.chance.random() < 0.05

            def received() -> None:
                if is_lost:
                    self._lost[island] = self.now
                else:
                    self.given[island.name] = held
                self.resume(island, "it ended in the middle" if is_lost else holds)

            self.after(self.chance.uniform(0.1, 4.0), received)
        elif self.now > until:
            self.resume(island, "nothing came")
        else:
            self.after(1.0, lambda: self._receive(island, name, until))

    def _exchange(self, island: Island, attempt: Attempt) -> None:
        key = attempt.number, tuple(attempt.members)
        meeting = self._meetings.setdefault(key, Meeting(attempt.members))
        me = island.mine.island
        pending = island.moved | island.memory
        meeting.there[me] = island
        meeting.sends[me] = frozenset(one for one in sorted(pending) if self.chance.random() < 0.8)
        if len(meeting.there) == len(meeting.members):
            self.after(self.chance.uniform(0.1, 3.0), lambda: self._finish(meeting))

        def give_up() -> None:
            if not meeting.over or meeting.outcome is None:
                meeting.over = True
                self.resume(island, Arrived(False, False, self._apart(meeting, island)))

        def look() -> None:
            members = [one for one in self.islands if one.mine.island in meeting.members]
            is_silent = not all(self._is_up(one) for one in members)
            self.after(0.0 if is_silent else PATIENCE - looked, give_up)

        looked = PATIENCE * (0.2 if self.calm else self.chance.uniform(0.2, 0.9))
        self.after(looked, look)

    def _apart(self, meeting: Meeting, island: Island) -> list[int]:
        missing = [n for n in meeting.members if n not in meeting.there]
        return missing + [
            n for n, one in meeting.there.items() if one.ended or not self.reach(one, island)
        ]

    def _finish(self, meeting: Meeting) -> None:
        """End an exchange to which all have come, unless one was given up on."""
        if meeting.over:
            return
        those = [*meeting.there.values()]
        if not all(self._is_up(one) for one in those):
            return  # the others wait in vain
        if not all(self.reach(one, other) for one in those for other in those if one is not other):
            return
        meeting.over = True
        bases = {one.shared.digest for one in those}
        if len(bases) > 1:
            raise BrokenPromiseError(f"members {meeting.members} hold different parameters")
        counted = those[0].shared.counted
        for sent in meeting.sends.values():
            if counted & sent:
                raise BrokenPromiseError(f"counted twice: {sorted(counted & sent)}")
            counted |= sent
        digest = hash((those[0].shared.digest, tuple(meeting.members), counted))
        meeting.outcome = Held(counted, digest)
        fate = 1.0 if self.calm else self.chance.random()
        lacking = [one for one in those if fate < 0.02 and self.chance.random() < 0.5]
        for one in those:  # of what is lost, the last messages tell that all has arrived
            is_lost = bool(lacking) or (fate < 0.05 and self.chance.random() < 0.5)
            came = Arrived(not is_lost, one not in lacking)
            wait = PATIENCE if is_lost else 0.0
            self.after(wait, lambda one=one, came=came: self.resume(one, came))

    def commit(self, island: Island, attempt: Attempt) -> None:
        """Let a step take effect on an island; check that it is the one of all others."""
        meeting = self._meetings[attempt.number, tuple(attempt.members)]
        me = island.mine.island
        if meeting.outcome is None:
            raise BrokenPromiseError(
                f"{island.name} commits attempt {attempt.number} that has not arrived"
            )
        digest = self._commits.setdefault(attempt.number, meeting.outcome.digest)
        if digest != meeting.outcome.digest and not self.forgets:
            raise BrokenPromiseError(
                f"attempt {attempt.number} was committed with other parameters"
            )
        if not self.forgets:
            self._follows(island, attempt.number)
        sent = meeting.sends[me]
        island.memory = (island.moved | island.memory) - sent
        island.moved = NONE
        island.shared, island.shares = meeting.outcome, True
        island.steps += 1
        island.connected = meeting.there
        island.committed.append((self.now, attempt.number))
        self.check(island)
        self.tell(f"{island.name} commits attempt {attempt.number} with {attempt.members}")

    def check(self, island: Island) -> None:
        """Check what an island has, which has just changed."""
        if self.forgets:
            return
        number, shared = island.mine.at, island.shared
        if number and shared.digest != self._commits[number]:
            raise BrokenPromiseError(f"{island.name} holds another outcome of attempt {number}")
        pending = island.moved | island.memory
        if pending & shared.counted:
            twice = sorted(pending & shared.counted)
            raise BrokenPromiseError(f"{island.name} is about to count twice: {twice}")
        if lost := island.trained - shared.counted - pending - island.dropped:
            raise BrokenPromiseError(f"{island.name} has lost {sorted(lost)} without being told")

    def _follows(self, island: Island, number: int) -> None:
        before = max((one for one in self._commits if one < number), default=None)
        if before is not None and island.shared.digest != self._commits[before]:
            raise BrokenPromiseError(f"attempt {number} does not go on from attempt {before}")

    def move(self) -> None:
        """End all, and begin anew at another place."""
        for one in self.islands:
            if not one.ended:
                self.kill(one)
        self.keys, self._meetings, self._hosted, self._commits = {}, {}, {}, {}
        self.tell("all go to another place")


def void(_: object) -> None:
    """Do nothing with an answer."""


def live(seed: int, make: Callable[..., Protocol] = Protocol, forgets: bool = False) -> World:
    """Live through a seed's faults, and check what the protocol promises; return the world."""
    world = World(seed, make, forgets)
    try:
        # Outcomes are summed up soon, and the silent are not waited for as long as the patience.
        with patch.object(history, "BLOCK", 2), patch.object(history, "_MOST_SECONDS", 0.8):
            _live(world)
    except BrokenPromiseError as error:
        told = "\n".join(world.story[-30:])
        raise BrokenPromiseError(f"seed {seed}: {error}\n{told}") from None
    return world


def _live(world: World) -> None:
    _disturb(world)
    _heal(world)
    healed = world.now
    while world.now < healed + SETTLED and not _is_settled(world, healed):
        world.run(world.now + PATIENCE)
    _check(world, healed)


def _disturb(world: World) -> None:
    """Let islands begin, and then whatever may happen to them."""
    chance = world.chance
    for number in range(chance.randint(2, MOST)):
        world.after(chance.uniform(0, 5), lambda number=number: void(world.start(f"i{number}")))
    until = chance.uniform(25.0, 70.0)
    time, names = 10.0, 10
    if chance.random() < 0.2:
        world.run(chance.uniform(10.0, 40.0))
        those = [chance.choice(world.islands)] if chance.random() < 0.4 else world.islands
        saved = [one for island in those for one in island.checkpoints]
        world.move()
        for _ in range(chance.randint(2, 5)):
            names += 1
            one = chance.choice([*saved[-20:], None])
            at = chance.uniform(0, 5)
            world.after(at, lambda name=f"i{names}", one=one: void(world.start(name, one)))
        time, until = world.now + time, world.now + until
    while (time := time + chance.expovariate(1 / 8.0)) < until:
        world.run(time)
        there = [one for one in world.islands if not one.ended]
        what, seconds = chance.random(), chance.expovariate(1 / PATIENCE)
        if what < 0.3 and there:
            world.stop(chance.choice(there), seconds * chance.choice([1, 2, 2, 8]))
        elif what < 0.45 and len(there) > 1:
            world.cut(*chance.sample(there, 2), 3 * seconds)
        elif what < 0.6 and there:
            world.kill(chance.choice(there))
        elif what < 0.9 and len(there) < MOST:
            names += 1
            saved = [one for island in world.islands for one in island.checkpoints]
            world.start(f"i{names}", chance.choice([*saved[-40:], None]))
        else:
            world.restart(min(seconds, PATIENCE))
    world.run(max(until, world._down.until))


def _heal(world: World) -> None:
    """End all faults, but that two islands may not reach each other."""
    chance, there = world.chance, [one for one in world.islands if not one.ended]
    if there and chance.random() < 0.2:  # one stands still until the others have gone far
        one = chance.choice(there)
        world.stop(one, chance.uniform(5, 10) * PATIENCE)
        world.run(one.still.until)
    for one in world.islands:
        one.still.end(world.now)
    world._cut = {pair: min(until, world.now) for pair, until in world._cut.items()}
    world.calm = True
    world.tell("no more faults")
    there = [one for one in world.islands if not one.ended]
    if len(there) > 2 and chance.random() < 0.2:
        world.apart = chance.sample(there, 2)
        world.cut(*world.apart, 2 * SETTLED)


def _is_settled(world: World, healed: float) -> bool:
    """Tell whether all have come through the same two outer steps since.

    Of two that do not reach each other one may have been left behind.
    """
    steps = [
        ({number for time, number in one.committed if time > healed}, one in world.apart)
        for one in world.islands
        if not one.ended
    ]
    behind = next((one for one in steps if one[1] and len(one[0]) < 2), None)
    together = [numbers for numbers, _ in steps if behind is None or numbers is not behind[0]]
    if world.apart and behind is None:  # they may take turns
        return all(len(numbers) > 1 for numbers in together)
    return not together or len(set.intersection(*together)) > 1


def _check(world: World, healed: float) -> None:
    """Check that those who are there have gone on together, and that nothing was lost untold."""
    if world.forgets:  # then no more is checked than each exchange
        return
    _check_ended(world)
    there = [one for one in world.islands if not one.ended]
    pairs = [pair for pair in combinations(there, 2) if world.reach(*pair)]
    if not world._commits and (len(there) < world.least or not pairs or world.least > 2):
        world.run(world.now + 62 * PATIENCE)  # there may be too few that could begin
        if not world._commits and any(not one.ended for one in there):
            raise BrokenPromiseError("islands wait to begin without an end")
        return
    if not _is_settled(world, healed):
        raise BrokenPromiseError("those who are there do not go on together")


def _check_ended(world: World) -> None:
    """Check that an island ended by itself only where nobody held what it needed."""
    for one in world.islands:
        if one.ended in (None, "killed") or world.forgets:
            continue
        if "there is nobody to join" in str(one.ended) or "does not answer" in str(one.ended):
            continue
        if "a run begins with" in str(one.ended) or one in world.apart:
            continue
        raise BrokenPromiseError(f"{one.name} ended: {one.ended}")
