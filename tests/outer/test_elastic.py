"""Islands that come and go, as threads of one process: over links, and over a bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sparcel.errors import MismatchError
from sparcel.products.meeting import Server
from tests.outer.at_once import all_at_once, looking_often, raised
from tests.outer.islands import Model, Named, Training, same

PATIENCE = 3.0


@pytest.fixture(params=["links", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return a place where islands meet."""
    with looking_often():
        if request.param == "bucket":
            yield str(tmp_path)
            return
        server = Server(0, tmp_path)
        yield f"tcp://127.0.0.1:{server.port}"
        server.close()


class Island(Training):
    """A training that remembers what was shared after each outer step, and when it was late."""

    def __init__(self, place: str, number: int, **settings: Any) -> None:
        given = {"every": 1, "least": 2, "patience": PATIENCE} | settings
        super().__init__(place, number, "default", **given)
        self.seen: dict[int, Named] = {}
        self.late = 0
        self._note()

    def _note(self) -> None:
        if self.outer.steps:
            self.seen[self.outer.steps] = self.shared()

    def step(self, poison: float | None = None) -> None:
        before, shared = self.outer.steps, self.shared()
        super().step(poison)
        if self.outer._visiting:
            self.late += 1
            assert self.outer.steps > before
            for name, now in self.local().items():
                progress, kept = self.before[name] - shared[name], now - self.shared()[name]
                assert float((progress - kept).abs().max()) < 1e-4
        self._note()

    @property
    def members(self) -> list[int]:
        members: list[int] = self.outer._islands._protocol._members  # type: ignore[union-attr]
        return members

    @property
    def has_come(self) -> bool:
        return self.outer._islands._protocol._mine is not None  # type: ignore[union-attr]


class Run:
    """One island leads: when it has seen enough, it says after which outer step all stop."""

    def __init__(self) -> None:
        self.target = 0

    def lead(self, island: Island, enough: Callable[[], bool]) -> None:
        while not enough():
            island.step()
            time.sleep(0.01)
        self.target = island.outer.steps + 3
        self.follow(island)

    def follow(self, island: Island) -> None:
        while not self.target or island.outer.steps < self.target:
            island.step()

    def join(self, place: str, number: int, after: Island, **settings: Any) -> Island:
        while not after.outer.steps:  # the run has begun then
            time.sleep(0.01)
        island = Island(place, number, **settings)
        self.follow(island)
        return island


def agree(islands: list[Island], at_least: int = 3) -> None:
    """Check that islands shared the same after each outer step that they have seen."""
    first, *others = islands
    for other in others:
        common = first.seen.keys() & other.seen.keys()
        assert len(common) >= at_least
        assert all(same(first.seen[step], other.seen[step]) for step in common)
        assert other.outer.steps == first.outer.steps
    for one in islands:
        beats = one.outer._islands._beats  # type: ignore[union-attr]
        assert beats is not None
        assert beats.steps == one.outer.steps
        assert beats.a_step > 0 or at_least == 1


@contextmanager
def waiting_less(*islands: Island) -> Iterator[None]:
    """Let islands wait for one that is slow for half a second, and for messages as before."""
    parts = [one.outer._islands._protocol for one in islands]  # type: ignore[union-attr]
    with ExitStack() as less:
        for one in parts:
            less.enter_context(patch.object(one, "_patience", 0.5))
        yield


def test_islands_join_leave_and_come_late(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sparcel.products.outer.islands._SENT_BYTES", 1000
    )  # guests get several parts
    with ThreadPoolExecutor(3) as threads:
        first, second = (Island(place, number) for number in range(2))
        run = Run()  # a third joins, with parameters of its own that do not count
        joining = threads.submit(run.join, place, 2, after=first, model=Model(seed=5))
        following = threads.submit(run.follow, second)
        run.lead(first, lambda: len(first.members) == 3)
        following.result()
        third = joining.result()
        agree([first, second, third])

        run = Run()  # the second calls no more
        with waiting_less(first, third):
            following = threads.submit(run.follow, third)
            run.lead(first, lambda: len(first.members) == 2)
            following.result()
        agree([first, third])

        run = Run()  # it comes back, keeping what it has moved
        assert not second.late
        others = [threads.submit(run.follow, one) for one in (second, third)]
        run.lead(first, lambda: len(first.members) == 3)
        for one in others:
            one.result()
        agree([first, second, third])
        assert second.late

        with pytest.raises(MismatchError, match="other settings"):
            Island(place, 3, every=2)
        run = Run()
        others = [threads.submit(run.follow, one) for one in (second, third)]
        run.lead(first, lambda: True)
        for one in others:
            one.result()
        agree([first, second, third])
        raised(all_at_once([one.outer.close for one in (first, second, third)]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 2}, r"other settings: every=2, where the run has every=1"),
        ({"model": Model(width=4)}, r"other tensors: last \[4\], where the run has last \[3\]"),
        ({"model": Model(seed=1)}, "other parameters"),
    ],
    ids=["settings", "layout", "parameters"],
)
def test_an_island_that_differs_is_told_and_the_others_begin(
    place: str, settings: dict[str, Any], words: str
) -> None:
    first = Island(place, 0)
    with ThreadPoolExecutor(2) as threads:
        stepping = threads.submit(first.step)
        while not first.has_come and not stepping.done():
            time.sleep(0.01)
        with pytest.raises(MismatchError, match=words):
            Island(place, 1, **settings).step()
        third = Island(place, 2)
        third.step()
        stepping.result()
    agree([first, third], at_least=1)
    raised(all_at_once([one.outer.close for one in (first, third)]))
