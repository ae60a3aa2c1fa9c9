"""Islands that reach one bucket exchange what connected ranks would, bit for bit."""

from __future__ import annotations

import os
import secrets
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import DistStoreError

import sparcel
from sparcel import simulate
from sparcel.core.comm import Call, Communicator, LostPeerError
from sparcel.core.comm.connected import ConnectedCommunicator
from sparcel.core.ops import MAX, MIN, PRODUCT, SUM
from sparcel.core.schemes import Bidirectional
from sparcel.errors import CommunicationError, InputError, MismatchError
from sparcel.products.delta import Folder, store_at
from sparcel.products.outer import files
from sparcel.products.outer.bucket import BucketRendezvous
from sparcel.products.outer.files import BucketStore
from sparcel.products.outer.places import Beats, meeting_at
from tests.collectives.test_processes import run_everything
from tests.evenly import even_averager
from tests.outer.at_once import PATIENCE, all_at_once, gathers, on_islands, raised
from tests.schemes.steps import copy_of, normal
from tests.strategies import DTYPES, same_bits, same_stream
from tests.training.tensors import TENSORS, gradients_of

SIZES = (1, 2, 3, 5)
SHORT = 0.5
"""The timeout where an island is waited for until it is over."""


@pytest.fixture(autouse=True)
def looking_often() -> Iterator[None]:
    with patch.multiple(files, _FOLDER_SECONDS=0.001, _REMOTE_SECONDS=0.001):
        yield


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a place with nothing in it."""
    pytest.importorskip("fsspec")
    return str(tmp_path / "bucket") if request.param == "folder" else in_memory()


def in_memory() -> str:
    return f"memory://{secrets.token_hex(8)}/bucket"


# What travels is what would travel otherwise.


@pytest.mark.parametrize("size", SIZES)
def test_every_collective_has_the_bits_of_the_simulated_cluster(size: int, tmp_path: Path) -> None:
    by_rank = raised(on_islands(tmp_path, size, run_everything, 5))
    simulated = simulate(size, lambda comm: run_everything(comm, 5)).results
    for results, references in zip(by_rank, simulated, strict=True):
        assert all(map(same_stream, results, references))
    assert store_at(tmp_path).names() == []


def dense_sums(comm: Communicator) -> list[Tensor]:
    """Reduce small integers, on which no order matters, in all dtypes by all operations."""
    sums = []
    for op in (SUM, PRODUCT, MIN, MAX):
        for dtype in DTYPES:
            for shape in ((0,), (7,), (3, 5), ()):
                vector = torch.full(shape, 1 + comm.rank % 3, dtype=dtype)
                comm.all_reduce(vector, op)
                sums.append(vector)
    return sums


def rounded_sum(comm: Communicator, dtype: torch.dtype) -> Tensor:
    vector = normal(comm.rank, 0, 301, dtype)
    comm.all_reduce(vector)
    return vector


@pytest.mark.parametrize("size", SIZES)
def test_dense_sums(size: int, place: str) -> None:
    by_rank = raised(on_islands(place, size, dense_sums))
    simulated = simulate(size, dense_sums).results
    for results, references in zip(by_rank, simulated, strict=True):
        assert all(map(same_bits, results, references))
    for dtype in (torch.bfloat16, torch.float32):
        by_rank = raised(on_islands(place, size, rounded_sum, dtype))
        expected = sum(
            (normal(rank, 0, 301, dtype) for rank in range(1, size)), normal(0, 0, 301, dtype)
        )
        assert all(same_bits(result, expected) for result in by_rank)
    assert store_at(place).names() == []


def scheme_steps(comm: Communicator) -> list[Tensor]:
    scheme, outcomes = Bidirectional(0.1, format="packed:4"), []
    for step in range(3):
        outcomes += [scheme.step(normal(comm.rank, step, 700), comm), copy_of(scheme.memory)]
    return outcomes


def averager_steps(comm: Communicator) -> list[Tensor]:
    scheme = sparcel.scheme("bidirectional", density=0.1, format="packed:4")
    averager = even_averager(TENSORS, scheme, group=comm)
    steps = [averager.average(gradients_of(comm.rank, step)) for step in range(3)]
    return [update for step in steps for update in step.values()]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("steps", [scheme_steps, averager_steps])
def test_steps_have_the_bits_of_the_simulated_cluster(
    size: int, steps: Callable[[Communicator], list[Tensor]], place: str
) -> None:
    by_rank = raised(on_islands(place, size, steps))
    simulated = simulate(size, steps).results
    for results, references in zip(by_rank, simulated, strict=True):
        assert all(map(same_bits, results, references))
    assert store_at(place).names() == []


def sums_of_halves(comm: Communicator) -> tuple[list[int], list[int]]:
    half = comm.split(comm.rank % 2)
    sums = half.gather_numbers(comm.rank), comm.gather_numbers(comm.rank)
    if comm.rank % 2:  # the others' ends with the communicator that it was split from
        half.close()
    return sums


def test_communicators_that_were_split(place: str) -> None:
    by_rank = raised(on_islands(place, 5, sums_of_halves))
    for rank, (half, whole) in enumerate(by_rank):
        assert half == [one for one in range(5) if one % 2 == rank % 2]
        assert whole == [0, 1, 2, 3, 4]
    assert store_at(place).names() == []


def on_a_bucket(comm: Communicator, path: str) -> list[list[int]]:
    """Make a communicator over a bucket beside that of the workers; also submit jobs."""
    store = BucketStore(path).under("run")
    meeting = BucketRendezvous(store, list(range(comm.size)), comm.rank, 60.0)
    other = ConnectedCommunicator(meeting)
    jobs = [other.submit(partial(gathers, other)) for _ in range(3)]
    results = [job.wait() for job in jobs]
    other.close()
    return results


@pytest.mark.processes
def test_processes(run_on: Any, tmp_path: Path) -> None:
    assert run_on(3, on_a_bucket, str(tmp_path)) == [[[0, 1, 2]] * 3] * 3
    assert store_at(tmp_path).names() == []


# Files.


def in_turns(comm: Communicator, way: str, most: list[int], place: Path) -> None:
    """Exchange many times; note the most messages that were in the bucket."""
    message, size = torch.zeros(9, dtype=torch.uint8), comm.size
    above, below = (comm.rank + 1) % size, (comm.rank - 1) % size
    for _ in range(20):
        if way == "all":
            comm.gather(message, 9)
        elif way == "ring":
            comm.exchange({above: message}, {below: 9})
        elif comm.rank < 2:  # the others have nothing to do
            comm.exchange({1 - comm.rank: message}, {1 - comm.rank: 9})
        most.append(sum("sent" in name for name in os.listdir(place) if "part" not in name))


@pytest.mark.parametrize(("way", "of_each"), [("all", 2), ("ring", 3), ("two", 2)])
def test_files_that_all_have_read_are_removed(way: str, of_each: int, tmp_path: Path) -> None:
    """A rank is ahead by one exchange at most, and tells with the next what it has read."""
    most: list[int] = []
    raised(on_islands(tmp_path, 3, in_turns, way, most, tmp_path))
    assert 0 < max(most) <= 3 * of_each
    assert store_at(tmp_path).names() == []


def test_a_message_to_many_is_one_file(tmp_path: Path) -> None:
    written: list[str] = []

    class Noting(Folder):
        def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
            written.append(name)
            return super().create(name, parts)

    def job(comm: Communicator) -> None:
        gathers(comm)
        messages = torch.arange(comm.size, dtype=torch.uint8)
        comm.all_to_all(messages, [1] * comm.size, [1] * comm.size)

    raised(on_islands([Noting(tmp_path) for _ in range(4)], 4, job))
    assert sum("sent" in name for name in written) == 4 + 4 * 3


# The store.


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), unique=True, max_size=8))
def test_keys_are_any_texts(texts: list[str]) -> None:
    pytest.importorskip("fsspec")
    kept = BucketStore(in_memory())
    store = kept.under("some/run")
    for number, text in enumerate(texts):
        assert not store.check([text])
        store.set(text, str(number))
        assert store.add(f"{''.join(texts)}n{number}", 2) == 2  # longer than any text
    assert all(store.get(text) == str(number).encode() for number, text in enumerate(texts))
    assert store.check(texts)
    for text in texts:
        assert store.delete_key(text)
        assert not store.delete_key(text)
    store.clear()
    assert kept.place.names() == []


@pytest.mark.parametrize("text", [b"", b"abc", b"\xff\xfe", b"5 x", b"9" * 5000 + b" x"])
def test_a_torn_counter_is_told(tmp_path: Path, text: bytes) -> None:
    store = BucketStore(tmp_path)
    store.add("n", 2)
    (tmp_path / "meet-n!2").write_bytes(text)
    with pytest.raises(DistStoreError, match=r"meet-n!2 in .* is torn, or not written") as told:
        store.add("n", 1)
    assert len(str(told.value)) < 500


def test_long_keys(tmp_path: Path) -> None:
    """A file system has 255 bytes for a name."""
    store = BucketStore(tmp_path)
    keys = ["ü/" * 500 + end for end in "ab"]
    for key in keys:
        store.set(key, key)
        assert store.add(key + "n", 3) == 3
        assert store.compare_set(key + "c", "", key) == key.encode()
    assert [store.get(key).decode() for key in keys] == keys


def test_values_that_are_waited_for(place: str) -> None:
    store, other = BucketStore(place), BucketStore(place)
    below = store.under("a")
    for short in (
        lambda: below.wait(["b"], timedelta(0)),
        partial(store.wait, ["b"], timedelta(0)),
    ):
        with pytest.raises(DistStoreError, match="b did not come to"):
            short()
    below.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(DistStoreError, match="a/b did not come to"):
        below.get("b")
    below.set_timeout(timedelta(seconds=60))
    with ThreadPoolExecutor() as threads:
        got = threads.submit(below.get, "b")
        other.set("a/b", b"\0\xff")
        assert got.result() == b"\0\xff"
    assert below.compare_set("b", "x", "y") == b"\0\xff"
    assert below.compare_set("c", "x", "y") == b"x"
    assert below.compare_set("b", b"\0\xff", "y") == b"y" == store.get("a/b")


def test_of_several_writers_the_first_wins(place: str) -> None:
    writers = 8
    for turn in range(10):
        stores, start = [BucketStore(place) for _ in range(writers)], threading.Barrier(writers)

        def race(rank: int, stores: Any = stores, start: Any = start, turn: int = turn) -> Any:
            start.wait()
            first = stores[rank].compare_set(f"first {turn}", "", str(rank))
            return first, stores[rank].add(f"count {turn}", 1), stores[rank].get(f"first {turn}")

        outcomes = raised(all_at_once([partial(race, rank) for rank in range(writers)]))
        assert len({first for first, *_ in outcomes} | {then for *_, then in outcomes}) == 1
        assert sorted(count for _, count, _ in outcomes) == list(range(1, writers + 1))


def test_a_repeated_request_counts_once(tmp_path: Path) -> None:
    """The answer of the first got lost."""

    class Repeating(Folder):
        def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
            parts = list(parts)
            return (super().create(name, parts) and not name.count("!")) or super().create(
                name, parts
            )

    store = BucketStore(Repeating(tmp_path))
    assert [store.add("n", 1) for _ in range(3)] == [1, 2, 3]
    assert raised(on_islands([Repeating(tmp_path) for _ in range(3)], 3, gathers))[0] == [0, 1, 2]


def test_places_that_cannot_be_buckets(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")

    class Plain:
        def read(self, name: str) -> memoryview: ...
        def write(self, name: str, parts: Any) -> int: ...
        def remove(self, name: str) -> None: ...
        def names(self) -> list[str]: ...
        def alone(self) -> Any: ...

    class Careless(Folder):
        def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
            self.write(name, parts)
            return True

    places: dict[str, Any] = {
        "Plain cannot be a bucket: it has no create": Plain(),
        "lets several writers create the same file": Careless(tmp_path),
        "cannot tell which of several writers": f"file://{tmp_path}",
        "a store is a path, a URL or a Store": 3,
    }
    for text, odd in places.items():
        with pytest.raises(InputError, match=text):
            BucketStore(odd)
    assert os.listdir(tmp_path) == []


# What fails.


class Changing(Folder):
    """A folder in which messages are changed when they are written."""

    def __init__(self, path: Path, change: Callable[[bytes], bytes]) -> None:
        super().__init__(path)
        self.change = change

    def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
        parts = list(parts)
        if "sent" in name:
            super().create(name, [self.change(b"".join(parts))])
            return True
        return super().create(name, parts)


def flipped(message: bytes) -> bytes:
    return message[:-1] + bytes([message[-1] ^ 1])


TORN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda message: b"",
    "head": lambda message: message[:9],
    "counts": lambda message: message[:30],
    "half": lambda message: message[:-4],
    "zeros": lambda message: message[:-8] + bytes(8),
    "all zeros": lambda message: bytes(len(message)),
    "flipped": flipped,
    "longer": lambda message: message + b"\0",
    "foreign": lambda message: b"{}" * 100,
}


@pytest.mark.parametrize("change", TORN.values(), ids=TORN)
def test_all_name_the_rank_whose_message_is_torn(
    change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    places = [Folder(tmp_path), Changing(tmp_path, change), Folder(tmp_path)]

    # The culprit, which gets all messages, must not be the first to give up.
    for outcome in on_islands(
        places, 3, partial(gathers, times=2), timeout=[SHORT, PATIENCE, SHORT]
    ):
        assert isinstance(outcome, CommunicationError)
        assert "a message of rank 1, which is torn in" in str(outcome)
    assert not any("sent" in name for name in os.listdir(tmp_path))


def test_a_message_that_is_torn_at_first(tmp_path: Path) -> None:
    class Slow(Folder):
        """Shows halves of files before it shows files, as NFS may."""

        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.looks: Counter[str] = Counter()

        def read(self, name: str) -> memoryview:
            self.looks[name] += 1
            whole = super().read(name)
            return whole[: len(whole) * self.looks[name] // 3] if "sent" in name else whole

    places = [Slow(tmp_path) for _ in range(3)]
    assert raised(on_islands(places, 3, partial(gathers, times=3))) == [[0, 1, 2]] * 3


def test_a_listing_that_lacks_an_earlier_message(tmp_path: Path) -> None:
    class Late(Folder):
        """Shows each file only after several looks, at random."""

        def names(self) -> list[str]:
            return [name for name in super().names() if "sent" not in name or secrets.randbelow(3)]

    def ahead(comm: Communicator) -> list[Tensor]:
        """Receive what another rank has sent long before."""
        if comm.rank == 0:
            for number in range(9):
                comm.exchange({1: torch.tensor([number], dtype=torch.uint8)}, {})
            return []
        return [comm.exchange({}, {0: 1})[0] for _ in range(9)]

    _, came = raised(on_islands([Late(tmp_path), Late(tmp_path)], 2, ahead))
    assert [one.item() for one in came] == list(range(9))


def test_all_name_the_rank_that_does_not_come(place: str) -> None:
    over = threading.Barrier(3)

    def absent(comm: Communicator) -> None:
        try:
            if comm.rank != 2:
                gathers(comm)
        finally:
            over.wait(60)

    first, second, _ = on_islands(place, 3, absent, timeout=SHORT)
    for outcome in (first, second):
        assert isinstance(outcome, CommunicationError)
        assert f"waited {SHORT} s for rank 2" in str(outcome)


def test_who_is_silent_is_not_waited_for_and_who_is_slow_is(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sparcel.products.outer.history._MOST_SECONDS", 0.2
    )  # dead after 0.5 s without one
    meeting = meeting_at(place, 60.0)
    assert meeting is not None
    beats = [Beats(meeting.board, island, 60.0) for island in (3, 7)]

    def exchange(rank: int, name: str) -> None:
        comm = meeting.connect(name, [3, 7], rank)
        comm.exchange({1 - rank: torch.ones(4, dtype=torch.uint8)}, {1 - rank: 4})

    try:
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(exchange, 0, "slow")
            with pytest.raises(TimeoutError):
                waiting.result(1.5)
            exchange(1, "slow")
            waiting.result()
            beats[1].end()
            with pytest.raises(CommunicationError, match="rank 7, which gives no sign of life"):
                exchange(0, "silent")
    finally:
        for one in beats:
            one.end()


def test_all_hear_of_a_rank_that_fails(place: str) -> None:
    """At once: nobody waits until the timeout is over."""

    def job(comm: Communicator) -> None:
        half = comm.split(0)
        if comm.rank == 1:
            raise InputError("H must be positive, got 0")
        half.gather_numbers(3)

    outcomes = on_islands(place, 3, lambda comm: comm.run(lambda: job(comm)))
    assert isinstance(outcomes[1], InputError)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, CommunicationError)
        assert "rank 1 failed: InputError: H must be positive, got 0" in str(outcome)
    assert not any("sent" in name for name in store_at(place).names())


def test_ranks_in_different_calls(place: str) -> None:
    def job(comm: Communicator) -> None:
        call = Call.of("step", {"every": 30 if comm.rank else 10})
        comm.call(call, lambda: gathers(comm))

    for outcome in on_islands(place, 3, job):
        assert isinstance(outcome, MismatchError)
        assert "step(every=10)" in str(outcome) or "of another call" in str(outcome)


def test_ranks_that_reduce_different_vectors(place: str) -> None:
    for outcome in on_islands(place, 2, lambda comm: comm.all_reduce(torch.ones(3 + comm.rank))):
        assert isinstance(outcome, MismatchError)
        assert "a message of another call" in str(outcome)


def test_a_message_of_another_version(tmp_path: Path) -> None:
    def newer(message: bytes) -> bytes:
        return message[:4] + struct.pack("<H", 7) + message[6:]

    places = [Folder(tmp_path), Changing(tmp_path, newer), Folder(tmp_path)]
    for outcome in on_islands(places, 3, partial(gathers, times=2)):
        assert isinstance(outcome, MismatchError)
        assert "rank 1 writes messages of version 7" in str(outcome)


def test_a_message_longer_than_its_bound(place: str) -> None:
    def job(comm: Communicator) -> None:
        for _ in range(2):  # the first may end well on the rank itself
            comm.gather(torch.zeros(10 + (comm.rank == 1), dtype=torch.uint8), 10)

    for outcome in on_islands(place, 3, job):
        assert isinstance(outcome, MismatchError)
        assert "rank 1 sent 11 bytes" in str(outcome)


def test_two_processes_with_one_rank(tmp_path: Path) -> None:
    """Their messages would be taken for one another's."""
    meeting = BucketRendezvous(BucketStore(tmp_path).under("run"), [0, 1], 0, 60.0)
    first, second = meeting.engine(), meeting.engine()
    for content, one in enumerate((first, second)):
        message = {1: [torch.tensor([content], dtype=torch.uint8)]}
        if one is first:
            one.exchange(message, {}, 0, 0)
        else:
            with pytest.raises(MismatchError, match="another process has its rank"):
                one.exchange(message, {}, 0, 0)
    first.abort()
    assert os.listdir(tmp_path) == []


def test_abort_wakes_who_waits(place: str) -> None:
    kept = BucketStore(place)
    engine = BucketRendezvous(kept.under("run"), [4, 7], 0, 600.0).engine()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(
            engine.exchange, {1: [torch.ones(3, dtype=torch.uint8)]}, {1: 3}, 5, 0
        )
        while not kept.place.names():
            assert not waiting.done()
        assert engine.waiting
        engine.abort()
        with pytest.raises(LostPeerError, match="rank 4 lost its connection"):
            waiting.result()
    assert not engine.waiting
    assert kept.place.names() == []


def test_a_place_that_fails(tmp_path: Path) -> None:
    """For a while it is borne with, while others are waited for."""

    class Failing(Folder):
        failures, full = 3, False

        def names(self) -> list[str]:
            self.failures -= 1
            if self.failures >= 0:
                raise OSError("the network is down")
            return super().names()

        def create(self, name: str, parts: Iterable[bytes | memoryview]) -> bool:
            if self.full and "sent" in name:
                raise OSError("the disk is full")
            return super().create(name, parts)

    places = [Failing(tmp_path) for _ in range(3)]
    assert raised(on_islands(places, 3, gathers))
    places[1].full = True
    outcomes = on_islands(places, 3, gathers, timeout=SHORT)
    assert all(isinstance(outcome, CommunicationError) for outcome in outcomes)
    assert all("rank 1 cannot use" in str(outcome) for outcome in outcomes)
    assert "the disk is full" in str(outcomes[1])
