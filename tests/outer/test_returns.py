"""Islands that come back from checkpoints, places that come back, and what strangers send."""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.core.schemes import Bidirectional, Dense
from sparcel.errors import CommunicationError, SparcelWarning
from sparcel.products.delta import Folder
from sparcel.products.meeting import Meeting, Server
from sparcel.products.outer import Method, Outer, attach
from sparcel.products.outer.history import Create, Now, Read, Wait, beat_seconds
from sparcel.products.outer.model import Model
from sparcel.products.outer.places import ASKED_SECONDS, pause_after
from sparcel.products.outer.protocol import Protocol
from sparcel.products.outer.shared import Shared
from tests.outer.at_once import all_at_once, looking_often, raised

PATIENCE = 3.0
PLAIN = Method(Dense(), lr=1.0, momentum=0.0)
"""What is shared becomes the mean of what islands have."""

OWING = Method(Bidirectional(1 / 8, returned=1.0), lr=1.0, momentum=0.0)
"""Memory holds most of what an island moves."""


class Island:
    """Adds 1 to its own coordinate in each inner step, so that each step can be counted."""

    over = threading.Event()
    """Whether the test is over."""

    def __init__(self, place: Any, number: int, method: Method = PLAIN, **settings: Any) -> None:
        self.number, self.done = number, 0
        self.model = nn.Module()
        self.model.p = nn.Parameter(torch.zeros(64, dtype=torch.float64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        given = {"every": 2, "patience": PATIENCE} | settings
        outer = attach(self.model, self.optimizer, method, islands=place, **given)
        assert isinstance(outer, Outer)
        self.outer = outer

    def step(self) -> None:
        self.model.p.grad = torch.zeros(64, dtype=torch.float64)
        self.model.p.grad[self.number] = -1.0
        self.done += 1
        self.optimizer.step()

    def until(self, steps: int) -> Island:
        return self.while_(lambda: self.outer.steps < steps)

    def while_(self, holds: Callable[[], bool]) -> Island:
        while holds() and not self.over.is_set():
            self.step()
            time.sleep(0.005)
        return self

    @property
    def shared(self) -> Tensor:
        return self.outer.shared["p"].clone()

    @property
    def memory(self) -> Tensor:
        state = self.outer._averager.handle.state_dict()
        owed = [
            one for name, one in state.items() if name.startswith("rank") and name.endswith(".p")
        ]
        return owed[0] if owed else torch.zeros(64)

    def save(self) -> tuple[Any, Any, Any]:
        model = {name: one.clone() for name, one in self.model.state_dict().items()}
        return model, self.optimizer.state_dict(), self.outer.state_dict()

    def load(self, saved: tuple[Any, Any, Any], order: str = "model first") -> Island:
        calls = [
            lambda: self.model.load_state_dict(saved[0]),
            lambda: self.optimizer.load_state_dict(saved[1]),
            lambda: self.outer.load_state_dict(saved[2]),
        ]
        for call in calls if order == "model first" else reversed(calls):
            call()
        return self


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with looking_often(), ThreadPoolExecutor(4) as pool:
        yield pool
        Island.over.set()
    Island.over.clear()


def together(threads: ThreadPoolExecutor, islands: list[Island], steps: int) -> None:
    for going in [threads.submit(one.until, steps) for one in islands]:
        going.result()


def in_pairs(threads: ThreadPoolExecutor, place: Any, **settings: Any) -> list[Island]:
    return [*threads.map(lambda number: Island(place, number, **settings), range(2))]


@pytest.mark.parametrize("order", ["model first", "model last"])
def test_who_comes_back_from_its_checkpoint_undoes_nothing(
    threads: ThreadPoolExecutor, tmp_path: Path, order: str
) -> None:
    first, second = in_pairs(threads, tmp_path)
    together(threads, [first, second], 2)
    saved = second.save()
    together(threads, [first, second], 4)
    second.outer._islands._beats.stop.set()  # type: ignore[union-attr]  # it dies
    target: list[int] = []
    going = threads.submit(first.while_, lambda: first.outer.steps not in target)
    again = Island(tmp_path, 1)
    before = again.shared
    with pytest.warns(SparcelWarning, match="the checkpoint is of 2"):
        again.load(saved, order)
    target.append(again.outer.steps + 3)
    again.until(*target)
    going.result()
    assert float((again.shared - before).min()) >= 0.0
    assert torch.equal(again.shared, first.shared)


def test_memory_of_a_checkpoint_is_sent_once(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    first, second = in_pairs(threads, tmp_path, method=OWING)
    together(threads, [first, second], 1)
    saved = second.save()
    together(threads, [first, second], 3)
    counted = first.shared
    second.outer._islands._beats.stop.set()  # type: ignore[union-attr]
    target: list[int] = []
    going = threads.submit(first.while_, lambda: first.outer.steps not in target)
    again = Island(tmp_path, 1, OWING)
    with pytest.warns(SparcelWarning, match="what it had moved until then and not sent is lost"):
        again.load(saved)
    assert not again.memory.any()
    target.append(again.outer.steps + 3)
    again.until(*target)
    going.result()
    assert float(counted[1]) <= float(first.shared[1])


def test_all_begin_again_at_another_place(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Of different outer steps, beside one without a checkpoint: they go on from the latest."""
    first, second = in_pairs(threads, tmp_path / "one")
    together(threads, [first, second], 3)
    early = second.save()
    together(threads, [first, second], 4)
    late = first.save()
    fresh = Island(tmp_path / "two", 2)
    islands = [
        Island(tmp_path / "two", 0).load(late),
        Island(tmp_path / "two", 1).load(early),
        fresh,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparcelWarning)
        together(threads, islands, 8)
    assert torch.equal(islands[0].shared, islands[1].shared)
    assert torch.equal(islands[0].shared, islands[2].shared)
    assert float(islands[0].shared[0]) > float(late[0]["p"][0])


def test_several_may_begin_from_one_checkpoint(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    """One of them goes on in the place of who has written it, the others as new islands."""
    first, second = in_pairs(threads, tmp_path / "one")
    together(threads, [first, second], 2)
    saved = first.save()
    again = [Island(tmp_path / "two", number).load(saved) for number in range(3)]
    with pytest.warns(SparcelWarning, match="another has loaded the same checkpoint") as told:
        together(threads, again, 6)
    assert len(told) == 2
    assert all(one.outer.islands == 3 and torch.equal(one.shared, again[0].shared) for one in again)


def test_an_older_checkpoint_of_the_same_island_replaces_nothing(
    threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    first, second = in_pairs(threads, tmp_path / "one")
    together(threads, [first, second], 1)
    early = first.save()
    together(threads, [first, second], 3)
    again = [Island(tmp_path / "two", n).load(one) for n, one in enumerate((first.save(), early))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparcelWarning)
        together(threads, again, 6)
    assert torch.equal(again[0].shared, again[1].shared)
    assert float(again[0].shared[0]) > float(first.shared[0])


def test_all_go_on_bit_for_bit_in_whatever_order_they_come(
    threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    islands = in_pairs(threads, tmp_path / "one", method=OWING)
    together(threads, islands, 2)
    saved = [one.save() for one in islands]
    together(threads, islands, 4)
    for order in ((0, 1), (1, 0)):
        place = tmp_path / f"{order}"
        again = {number: Island(place, number, OWING) for number in order}
        for number, one in again.items():
            one.load(saved[number])
        together(threads, [*again.values()], 4)
        for number, one in again.items():
            assert torch.equal(one.shared, islands[number].shared)
            assert torch.equal(one.memory, islands[number].memory)


def test_the_place_may_restart(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    server = Server(0, tmp_path)
    place = f"tcp://127.0.0.1:{server.port}/run"
    islands = in_pairs(threads, place)
    together(threads, islands, 2)
    server.close()
    going = [threads.submit(one.until, 5) for one in islands]
    time.sleep(0.5)
    server = Server(server.port, tmp_path)
    for one in going:
        one.result()
    assert torch.equal(islands[0].shared, islands[1].shared)
    raised(all_at_once([one.outer.close for one in islands]))
    server.close()


def test_a_place_that_never_answers_again_is_told(tmp_path: Path) -> None:
    server = Server(0, tmp_path)
    island = Island(f"tcp://127.0.0.1:{server.port}", 0, least=1, patience=0.1)
    server.close()
    with pytest.raises(CommunicationError, match="has not answered for 1 s"):
        island.until(9)


def test_exchanges_that_never_end_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    island = Island(str(tmp_path), 0, every=1, least=1, patience=0.1)

    def late() -> None:
        raise CommunicationError("waited 0.1 s")

    monkeypatch.setattr(island.outer._exchange, "_agree", late)
    with pytest.raises(CommunicationError, match=r"islands \[1\] .* a larger patience=") as told:
        island.step()
    assert "waited 0.1 s" in str(told.value.__context__)
    assert becomes_silent(tmp_path)


def test_an_island_that_is_interrupted_gives_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    island = Island(str(tmp_path), 0, every=1, least=1)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(island.outer._exchange, "_agree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        island.step()
    assert becomes_silent(tmp_path)


def becomes_silent(place: Path) -> bool:
    """Wait for at most ten seconds until no sign of life is left at a place."""
    for _ in range(1000):
        if not any(place.glob("*beat*")):
            return True
        time.sleep(0.01)
    return False


class Failing(Folder):
    """A bucket of which one request in so many fails."""

    def __init__(self, path: Path, often: int) -> None:
        super().__init__(path)
        self.requests, self.often = 0, often

    def _count(self) -> None:
        self.requests += 1
        if self.requests % self.often == 0:
            raise OSError(5, "503 Slow Down")

    def read(self, name: str) -> memoryview:
        self._count()
        return super().read(name)

    def create(self, name: str, parts: Any) -> bool:
        self._count()
        return super().create(name, parts)

    def names(self) -> list[str]:
        self._count()
        return super().names()


def test_requests_that_fail_are_made_again(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    stores = [Failing(tmp_path, 7), Failing(tmp_path, 11)]
    islands = [*threads.map(lambda number: Island(stores[number], number), range(2))]
    together(threads, islands, 3)
    assert torch.equal(islands[0].shared, islands[1].shared)


def test_who_waits_asks_seldom() -> None:
    """At most twice a second, signs of life included; nobody else ever comes."""
    mine, now, asked = Protocol("1", {"layout": "1"}, "", 2, 60.0), 0.0, list[float]()
    keys: dict[str, str] = {}
    for part in (mine.enter(), mine.meet()):
        answer: Any = None
        while now < 600:
            try:
                action = part.send(answer)
            except StopIteration:
                break
            answer = now if isinstance(action, Now) else None
            if isinstance(action, Create):
                answer = keys.setdefault(action.key, action.text)
            if isinstance(action, Read):
                answer = keys.get(action.key)
            if isinstance(action, Create | Read):
                asked.append(now)
            if isinstance(action, Wait):
                now += pause_after(action.waited, ASKED_SECONDS)
    late = [time for time in asked if time > 5]
    assert 0.5 < len(late) / (now - 5) <= 2 - 1 / beat_seconds(60.0)


def test_an_outer_rate_goes_with_what_is_shared(
    threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    islands = in_pairs(threads, tmp_path)
    for one in islands:
        one.outer.optimizer.param_groups[0]["lr"] = 0.5
    together(threads, islands, 2)
    target: list[int] = []
    going = [
        threads.submit(one.while_, lambda one=one: one.outer.steps not in target) for one in islands
    ]
    late = Island(tmp_path, 2)
    assert late.outer.optimizer.param_groups[0]["lr"] == 0.5
    late.outer.optimizer.param_groups[0]["lr"] = 0.9  # a schedule of its own
    target.append(late.outer.steps + 3)
    with pytest.warns(SparcelWarning, match="outer learning rate is 0.9; it goes on with 0.5"):
        late.until(*target)
    for one in going:
        one.result()
    assert torch.equal(late.shared, islands[0].shared)
    saved = islands[0].save()
    again = Island(tmp_path / "two", 0, least=1).load(saved)
    assert again.outer.optimizer.param_groups[0]["lr"] == 0.5


def test_momenta_are_those_of_the_outer_optimiser(tmp_path: Path) -> None:
    island = Island(tmp_path, 0, Method(Dense()), least=1).until(2)
    island.outer.optimizer.load_state_dict(island.outer.optimizer.state_dict())
    island.until(3)
    state = island.outer.optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(island.outer.state_dict()["momentum.p"], state[:64])


def join_in_ddp(comm: Communicator, place: str) -> Any:
    """Be an island of two ranks that joins; return what each rank has before and after."""
    torch.manual_seed(comm.rank)
    model = DistributedDataParallel(nn.Linear(4, 4, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = attach(model, optimizer, PLAIN, every=2, islands=place, patience=PATIENCE)
    begin = outer.steps, model.module.weight.detach().clone()
    while outer.steps < begin[0] + 3:
        optimizer.zero_grad()
        model(torch.ones(1, 4, dtype=torch.float64) * comm.rank).sum().backward()
        optimizer.step()
        time.sleep(0.01)
    outer.close()
    return begin, outer.steps, model.module.weight.detach().clone()


@pytest.mark.processes
def test_an_island_of_ddp_joins_with_all_its_ranks(
    run_on: Callable[..., list[Any]], tmp_path: Path
) -> None:
    server = Server(0, tmp_path)
    place = f"tcp://127.0.0.1:{server.port}/ddp"
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = attach(model, optimizer, PLAIN, every=2, islands=place, least=1, patience=PATIENCE)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(run_on, 2, join_in_ddp, place)
        while not joining.done():
            optimizer.zero_grad()
            model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
            time.sleep(0.01)
        (begin, steps, after), (other_begin, other_steps, other_after) = joining.result()
    assert begin[0] == other_begin[0] > 0
    assert steps == other_steps
    assert torch.equal(begin[1], other_begin[1])
    assert torch.equal(after, other_after)
    outer.close()
    server.close()


def test_what_strangers_send_changes_nothing(tmp_path: Path) -> None:
    server = Server(0, tmp_path)
    island = Island(f"tcp://127.0.0.1:{server.port}/run", 0, least=1).until(2)
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for number, text in enumerate(
        (
            b"\0" * 4096,
            b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
            b"PUT /run/../x HTTP/1.1\r\nContent-Length: 1\r\n\r\nx",
            b"PUT /run/a HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
            b"PUT /run/a HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"PUT /run/a HTTP/1.1\r\nContent-Length: many\r\n\r\n",
            b"PUT /run/run-1.outcome HTTP/1.1\r\nContent-Length: 9\r\n\r\nab",
            b"PUT /run/run-1.outcome HTTP/1.1\r\nIf-None-Match: *\r\n"
            b"Content-Length: 5\r\n\r\nabort",
            b"BREW /run/pot HTTP/1.1\r\n\r\n",
        )
    ):
        held[number].sendall(text)
        held[number].shutdown(socket.SHUT_WR)
    island.until(5)
    for one in held:
        one.close()
    assert island.until(7).outer.steps == 7
    meeting = Meeting("127.0.0.1", server.port, "run", 1.0)
    assert bytes(meeting.read("run-1.outcome")) == b"commit"
    assert "a" not in meeting.names()
    island.outer.close()
    server.close()


def test_the_digest_sees_permutations_and_signs() -> None:
    def of(tensor: Tensor) -> int:
        shared = Shared(Model(nn.ParameterList([tensor]), False, []), PLAIN)
        return shared.digest(shared.vectors)

    plain = torch.randn(6, 10)
    signs = plain.clone()
    signs[2, 3] *= -1
    both = signs.clone()
    both[4, 5] *= -1
    swapped = plain[[1, 0, 2, 3, 4, 5]]
    assert (
        len({of(one) for one in (plain, signs, both, swapped, plain[:, [1, 0, *range(2, 10)]])})
        == 5
    )
    assert of(plain) == of(plain.clone())
