"""Islands in simulated worlds keep their promises, and a world finds faults that are planted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.errors import CommunicationError
from sparcel.products.outer import history
from sparcel.products.outer.history import (
    ABORT,
    BLOCK,
    COMMIT,
    Action,
    Create,
    History,
    Quorum,
    Read,
    Run,
    Watches,
    beat_seconds,
)
from sparcel.products.outer.presence import Came
from sparcel.products.outer.protocol import Protocol
from tests.outer import world as worlds
from tests.outer.world import PATIENCE, BrokenPromiseError, Island, World, live

WORLDS, PIECES = 100_000, 8
"""How many seeds the slow tests live through, and in how many tests."""

ENOUGH = 6000
"""How many seeds find every planted fault."""


@pytest.mark.parametrize("forgets", [False, True], ids=["lasting", "forgetful"])
def test_promises_hold_in_some_worlds(forgets: bool) -> None:
    for seed in range(80):
        live(seed, forgets=forgets)


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_promises_hold_in_many_worlds(piece: int) -> None:
    for seed in range(1000 + piece, 1000 + WORLDS, PIECES):
        live(seed)


def test_a_seed_is_a_story_that_is_told_again() -> None:
    assert live(7).story == live(7).story != live(8).story


class Files(World):
    """A world in which nobody sees another's connection end."""

    def _do(self, island: Island, action: object) -> None:
        if isinstance(action, history.Gone):
            self.after(0.0, lambda: self.resume(island, set()))
        else:
            super()._do(island, action)


@pytest.mark.parametrize("who", ["member", "guest"])
def test_who_gives_no_sign_of_life_is_not_waited_for(who: str) -> None:
    with patch.object(history, "_MOST_SECONDS", 0.8):  # 2 s without one
        world = Files(0)
        world.calm = True
        one, other = world.start("one"), world.start("other")
        for island in (one, other):
            island.every, island.inner_s = 1, 0.3
        world.run(30.0)
        if who == "guest":
            hosts, other = (one, other), world.start("guest")
            while not any(host.mine._brings for host in hosts):
                world.run(world.now + 0.1)
        world.kill(other)
        killed = world.now
        world.run(killed + 1.0)
        done = len(one.committed)
        world.run(killed + 0.8 * PATIENCE)
    assert len(one.committed) > done > 1


@given(pauses=st.lists(st.integers(1, 10_000), min_size=4, max_size=8))
def test_however_long_an_island_stood_still_a_look_counts_one_beat_of_silence(
    pauses: list[int],
) -> None:
    watches, now = Watches(5.0), 0.0
    for looks, pause in enumerate(pauses):
        now += pause * beat_seconds(5.0)
        assert watches.is_due(1, now)
        watches.hear(1, "the same signs")
        assert watches.is_silent(1) == (looks * beat_seconds(5.0) >= watches.silent)


def test_who_comes_while_a_run_ends_is_told() -> None:
    world = World(0)
    late = world.start("late")
    while not late.mine.place:
        world.run(world.now + 0.01)
    world.keys.clear()
    world.keys["ended"] = "", world.now
    world.run(world.now + PATIENCE)
    assert late.ended is not None and "has ended" in late.ended


def a_run() -> tuple[World, Island, Island]:
    """Return a world without faults in which two islands have trained for a while."""
    world = World(0)
    world.calm = True
    islands = world.start("one"), world.start("other")
    while world.now < 30.0:
        world.run(world.now + 0.5)
        for island in islands:
            island.save()
    return world, *islands


@pytest.mark.parametrize("later", [False, True], ids=["the same", "a later checkpoint"])
@pytest.mark.parametrize("dead", [1, 8, "a host"])
def test_a_run_begins_without_those_who_came_and_died(later: bool, dead: int | str) -> None:
    """They have loaded the same checkpoint as the others, or a later one."""
    with patch.object(history, "_MOST_SECONDS", 0.8):
        world, writer, _ = a_run()
        saved = writer.checkpoints[len(writer.checkpoints) // 2]
        world.move()
        two = [world.start(f"i{number}", saved) for number in range(2)]
        world.run(world.now + 1.0)
        last = writer.checkpoints[-1] if later else saved
        dying = [world.start(f"dead {number}", last) for number in range(8 if dead == 8 else 1)]
        while dying:
            world.run(world.now + 0.02)
            for one in [*dying]:
                if one.mine._hosted if dead == "a host" else one.mine._mine:
                    world.kill(one)
                    dying.remove(one)
        assert not world._commits
        world.run(world.now + 8 * PATIENCE)
    assert all(len(one.committed) > 1 for one in two)


@pytest.mark.parametrize("lag", [0.0, 1.0, 0.5 * PATIENCE])
def test_all_may_stop_and_come_back_without_a_loss(lag: float) -> None:
    with patch.object(history, "_MOST_SECONDS", 0.8):
        world, *islands = a_run()
        for island in islands:
            world.kill(island)
        world.run(world.now + PATIENCE)
        again = []
        for island in islands:
            again.append(world.start(f"{island.name} again", island.checkpoints[-1]))
            world.run(world.now + lag)
        world.run(world.now + 8 * PATIENCE)
    assert not any(one.dropped for one in again)
    assert all(len(one.committed) > 1 for one in again)


def test_islands_that_never_reach_each_other_say_so() -> None:
    world = World(0)
    world.calm = True
    islands = world.start("one"), world.start("other")
    world.cut(*islands, 1e9)
    world.run(30 * PATIENCE)
    assert all("cut" in str(one.ended) for one in islands)


def test_other_parameters_of_a_dead_island_do_not_count() -> None:
    class Other(Island):
        def begin(self) -> None:
            self.mine.steps, self.mine.state = self.steps, "another"

    world = World(0)
    world.calm = True
    with patch.object(worlds, "Island", Other):
        dead = world.start("dead")
    while dead.mine._mine is None:
        world.run(world.now + 0.1)
    world.kill(dead)
    islands = world.start("one"), world.start("two")
    world.run(world.now + 10 * PATIENCE)
    assert all(len(one.committed) > 1 for one in islands)


def driven(world: World, part: Run[Any]) -> Any:
    """Return what a part returns whose requests the place answers at once."""
    answer = None
    try:
        while True:
            answer = world._answer(world.keys, part.send(answer))
    except StopIteration as end:
        return end.value


def test_islands_may_load_one_anothers_checkpoints_as_they_train() -> None:
    world, one, other = a_run()
    for mine, saved in ((one, one), (one, other), (other, one), (one, one)):
        driven(world, mine.mine.resume(*saved.checkpoints[-1].numbers))
    late = world.start("late")
    while late.mine.origin == ("", 0, 0):
        world.run(world.now + 0.1)
    late.save()
    for island in (one, other, late):
        world.kill(island)
    for mine in (late, one):
        driven(world, mine.mine.resume(*late.checkpoints[-1].numbers))
    two = [world.start(f"{number}", one.checkpoints[-1]) for number in range(2)]
    world.run(world.now + 1.4 * PATIENCE)
    first, second = sorted(two, key=lambda heir: len(heir.mine._heir_of))
    assert first.mine._key in second.mine._heir_of


def test_other_settings_are_told_of_though_nobody_was_heard_at_first() -> None:
    class Deaf(Protocol):
        def _is_alive(self, island: int) -> Run[bool]:
            yield from ()
            return False

    world = World(0, Deaf)
    first, other = world.start("first"), world.start("other")
    other.mine._facts = other.mine._facts | {"settings": "2"}
    other.mine._told = json.dumps(other.mine._facts, sort_keys=True)
    world.run(4 * PATIENCE)
    assert first.ended is None
    assert "settings=2, where the run has settings=1" in str(other.ended)


def test_who_comes_again_with_the_same_words_is_another_guest() -> None:
    """The one whom it was to be hosted by may be dead, and its key stays."""
    world = World(0)
    mine = world.start("one").mine
    world.run(PATIENCE)
    places = []
    for _ in range(2):
        mine._mine = None
        driven(world, mine._come(world.now))
        places.append(mine._mine[1])
    assert places[0] < places[1]


def test_whenever_an_island_has_looked_last_it_learns_of_all_attempts_from_a_summary() -> None:
    world, first, made = World(0), History(), 4 * BLOCK + 3
    others = [History() for _ in range(made)]
    for number, other in enumerate(others, 1):
        outcome = ABORT if number % 5 == 0 else COMMIT
        driven(world, first.propose(number, Quorum([1], "", [])))
        driven(world, first.decide(number, [1], outcome))
        driven(world, first.look())
        driven(world, first.sum_up(first.latest))
        driven(world, other.look())
    assert "closed.0" in world.keys
    for other in others:
        driven(world, other.look())
        assert (other.next, other.latest) == (made + 1, first.latest)


class KeepsAll(Protocol):
    """Who comes back sends what it had in its checkpoint."""

    def _taken(self, at: int, steps: int, state: str) -> Run[bool]:
        yield from super()._taken(at, steps, state)
        return True


class Drops(Protocol):
    """Who was late loses what it had moved."""

    def _taken(self, at: int, steps: int, state: str) -> Run[bool]:
        yield from super()._taken(at, steps, state)
        return False


class Doubts(Protocol):
    """Who stood still takes a step that the others have gone on from for one without it."""

    def decide(self, *args: Any) -> Run[bool]:
        took_effect = yield from super().decide(*args)
        if (yield Read(f"{self._attempt.number + 1}.outcome")) is not None:
            return False
        return took_effect


class Stubborn(Protocol):
    """Who waits does not see that the others have gone on."""

    def _agree(self) -> Run[Any]:
        number = self._history.next
        while (quorum := (yield from self._history.quorum(number))) is None:
            came = yield from self._all_came(number)
            if len(came) > 1:
                yield from self._history.propose(number, Quorum(came, self._told, [*self.holds]))
        return quorum

    def _all_came(self, number: int) -> Run[list[int]]:
        yield from self._come(0.0)
        yield from self._look(number)
        return sorted({one.island for one in self._came[number]})


def answered(part: Run[Any], answer: Callable[[Action], Run[Any]]) -> Run[Any]:
    """Return what a part returns whose actions get other answers."""
    answers: Any = None
    while True:
        try:
            action = part.send(answers)
        except StopIteration as end:
            return end.value
        answers = yield from answer(action)


def believing(key: str) -> type[Protocol]:
    """Return a part that takes for decided what it has proposed."""

    def own(action: Action) -> Run[Any]:
        found = yield action
        is_own = isinstance(action, Create) and action.key.endswith(key)
        return action.text if is_own else found

    class Believing(Protocol):
        def decide(self, *args: Any) -> Run[bool]:
            return (yield from answered(super().decide(*args), own))

        def meet(self) -> Run[Any]:
            return (yield from answered(super().meet(), own))

    return Believing


class Careless(Protocol):
    """Those who hold different parameters take part in one attempt."""

    def _agree(self) -> Run[Any]:
        def all_of_them(action: Action) -> Run[Any]:
            if isinstance(action, Create) and action.key.endswith("quorum"):
                came = sorted({one.island for one in self._came[self._history.next]})
                text = json.dumps(json.loads(action.text) | {"members": came})
                action = Create(action.key, text)
            return (yield action)

        return (yield from answered(super()._agree(), all_of_them))


class Forgetful(Protocol):
    """An outcome is asked for after it was summed up, and removed."""

    def decide(self, *args: Any) -> Run[bool]:
        def unread(action: Action) -> Run[Any]:
            return None if isinstance(action, Read) else (yield action)

        return (yield from answered(super().decide(*args), unread))


class Unfenced(Protocol):
    """Two go on from one checkpoint, and both send what it holds."""

    def resume(self, place: str, island: int, order: int, at: int) -> Run[None]:
        yield from super().resume(place, island, order, at)
        self._heir_of = []


class Inhospitable(Protocol):
    """Nobody sends what is shared to those who are behind."""

    def _welcome(self, number: int, hosts: set[int], behind: set[int]) -> Run[None]:
        yield from ()


class Impatient(Protocol):
    """The first to come does not wait for others to begin."""

    def _check_begins(self, now: float, last: dict[int, Came]) -> None:
        raise CommunicationError("a run begins with 2 islands")


class Insistent(Protocol):
    """Islands that do not reach each other try again for ever."""

    def _keep_apart(self, islands: Sequence[int], why: str) -> Run[None]:
        yield from ()


FAULTS = {
    "who comes back keeps what it had": KeepsAll,
    "who was late loses what it has moved": Drops,
    "who stood still keeps what was counted": Doubts,
    "who waits is not told": Stubborn,
    "each believes its own quorum": believing("quorum"),
    "each believes its own outcome": believing("outcome"),
    "different parameters": Careless,
    "removed outcomes": Forgetful,
    "two from one checkpoint": Unfenced,
    "no host": Inhospitable,
    "for ever with those out of reach": Insistent,
    "not long enough for others to begin": Impatient,
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(fault: type[Protocol]) -> None:
    with pytest.raises(BrokenPromiseError, match="seed"):
        [live(seed, make=fault) for seed in range(ENOUGH)]
