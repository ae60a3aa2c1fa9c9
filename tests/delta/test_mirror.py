"""Readers of a mirror see whole versions, whatever its follower does, or they stand still."""

from __future__ import annotations

import errno
import multiprocessing
import random
import shutil
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sparcel.core._files import shared
from sparcel.errors import FormatError, InputError, VersionError
from sparcel.products.delta import (
    Folder,
    Follower,
    HostSubscriber,
    Mirror,
    Publisher,
    Ready,
    Seen,
    assign_,
    mirror,
    version_of,
)
from sparcel.products.delta.files import File
from tests.delta.histories import history
from tests.delta.pairs import Model, copied, same

PLACE, PAGE = "mirror", "mirror.page"


class Worker:
    """Keeps weights of its own, by what a mirror tells."""

    def __init__(self, place: Path) -> None:
        self.mirror = Mirror(place)
        self.weights = Model()

    def load(self) -> Seen | None:
        seen = self.mirror.update()
        if seen is None:
            return None
        if seen.base is None:
            self.weights, self.tied = Model(), set[str]()
            for change in seen.changes():
                assert change.values is not None
                self.weights[change.name] = change.values.clone().view(change.shape)
                self.tied |= {change.name} if change.tied_to else set()
        else:
            assign_(self.weights, seen.changes())
        own = {name: one for name, one in self.weights.items() if name not in self.tied}
        assert version_of(own, seen.version.number) == seen.version
        return seen


def begun(folder: Path, model: Model) -> tuple[Publisher, Follower, Worker]:
    """Publish a version, which a mirror and a worker then have."""
    publisher = Publisher(folder / "store")
    publisher.publish(model)
    follower = Follower(folder / "store", folder / PLACE)
    follower.update()
    worker = Worker(folder / PLACE)
    worker.load()
    return publisher, follower, worker


def test_workers_see_each_version(tmp_path: Path) -> None:
    """At each step, at some, or only the last; and they read no more than what changes."""
    models = history(8)
    publisher = Publisher(tmp_path / "store", anchor_every=4, lag=9)
    follower = Follower(tmp_path / "store", tmp_path / PLACE)
    workers = [Worker(tmp_path / PLACE) for _ in range(3)]
    assert follower.update() is None
    assert workers[0].load() is None
    for number, model in enumerate(models):
        version = publisher.publish(model)
        assert follower.update() == version == follower.version
        assert follower.update() is None
        for step, worker in enumerate(workers, 1):
            if number % step == 0:
                seen = worker.load()
                assert seen is not None
                assert seen.version == worker.mirror.version == version
                assert same(worker.weights, model)
                assert same(worker.mirror.tensors, model)
                assert (seen.base is None) is (number == 0)
                if number and step == 1:
                    told = sum(len(change.indices) for change in seen.changes())
                    assert 0 < told < 100
        assert workers[0].load() is None
    late = Worker(tmp_path / PLACE)
    late.load()
    assert same(late.weights, models[-1])


def test_a_worker_that_is_far_behind_is_told_all(tmp_path: Path) -> None:
    models = history(8)
    publisher, follower, worker = begun(tmp_path, models[0])
    for model in models[1:]:
        publisher.publish(model)
        follower.update()
    seen = worker.load()
    assert seen is not None
    assert seen.base is None
    assert same(worker.weights, models[-1])
    files = {path.name.partition("-")[0] for path in (tmp_path / PLACE).iterdir()}
    assert files == {PAGE, "model.safetensors", "changes", ".lock"}


def test_tensors_that_come_go_and_are_tied(tmp_path: Path) -> None:
    """A new file takes the place of the old one, which readers may still have."""
    w = torch.arange(40.0)
    models: list[Model] = [
        {"a": w, "b": w * 2},
        {"a": w + 1, "b": w * 2, "c": torch.ones(3)},
        {"a": w + 1, "c": torch.ones(3)},
    ]
    tied = w + 5
    models += [{"a": tied, "c": tied}]
    moved = tied + torch.cat([torch.zeros(39), torch.ones(1)])
    models += [{"a": moved, "c": moved}]
    publisher = Publisher(tmp_path / "store")
    follower = Follower(tmp_path / "store", tmp_path / PLACE)
    worker = None
    for number, model in enumerate(models):
        publisher.publish(model)
        follower.update()
        worker = worker or Worker(tmp_path / PLACE)
        seen = worker.load()
        assert seen is not None
        assert same(worker.weights, model)
        assert (seen.base is None) is (number < 4)
    assert worker is not None
    tensors = worker.mirror.tensors
    assert tensors["a"].data_ptr() == tensors["c"].data_ptr()
    told = {change.name: (len(change.indices), change.tied_to) for change in seen.changes()}
    assert told == {"a": (1, None), "c": (1, "a")}


def test_other_libraries_find_tied_tensors_under_each_name(tmp_path: Path) -> None:
    """They do not know the file's ties, and may load a certain name only."""
    models = []
    for number in range(4):
        w = torch.arange(40.0).bfloat16()
        w[:number] += 1
        models.append({"a": torch.zeros(()), "b": w.view(8, 5), "head": w.view(8, 5)})
    publisher, follower, worker = begun(tmp_path, models[0])
    file = tmp_path / PLACE / "model.safetensors"
    for model in models[1:]:
        publisher.publish(model)
        follower.update()
        assert same(load_file(file), copied(model))
    follower.update(0)
    assert same(load_file(file), copied(models[0]))
    follower.close()
    File(shared(file, writes=True), "").copies()["head"].view(torch.int16)[0] ^= 1
    assert not same(load_file(file), copied(models[0]))
    HostSubscriber(tmp_path / "store", tmp_path / PLACE).go_to(0)
    assert same(load_file(file), copied(models[0]))
    worker.load()
    assert same(worker.weights, models[0])


def test_a_follower_goes_on_with_a_whole_mirror_and_else_makes_it_anew(tmp_path: Path) -> None:
    models = history(4)
    publisher, follower, worker = begun(tmp_path, models[0])
    follower.close()
    publisher.publish(models[1])
    follower = Follower(tmp_path / "store", tmp_path / PLACE)
    assert follower.version is not None
    with patch.object(follower, "_begin", side_effect=AssertionError):
        follower.update()
    seen = worker.load()
    assert seen is not None
    assert seen.base is not None
    for damage in ("odd", "weights"):
        follower.close()
        file = tmp_path / PLACE / "model.safetensors"
        if damage == "odd":
            follower._page._words[1] |= 1
        else:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        follower = Follower(tmp_path / "store", tmp_path / PLACE)
        assert follower.version is None
        assert follower.update() == worker.mirror.version
        assert worker.load() is None
    publisher.publish(models[2])
    follower.update()
    seen = worker.load()
    assert seen is not None
    assert seen.base is not None
    assert same(worker.weights, models[2])


def test_readers_wait_while_a_version_is_written(tmp_path: Path) -> None:
    models = history(2)
    publisher, follower, worker = begun(tmp_path, models[0])
    publisher.publish(models[1])
    halted, go_on = threading.Event(), threading.Event()
    apply = Ready.apply

    def halfway(ready: Ready) -> None:
        halted.set()
        assert go_on.wait(60)
        apply(ready)

    with patch.object(Ready, "apply", halfway):
        writer = threading.Thread(target=follower.update)
        writer.start()
        assert halted.wait(60)
        with (
            patch.object(mirror, "_PATIENCE", 0.05),
            pytest.raises(VersionError, match=r"being written to .* for 0.05 seconds; if its foll"),
        ):
            worker.load()
        threading.Timer(0.05, go_on.set).start()
        assert worker.load() is not None
        writer.join()
    assert same(worker.weights, models[1])


def test_what_was_made_of_two_versions_is_told(tmp_path: Path) -> None:
    """Of a reader that reads all, and stands still meanwhile; it reads all again."""
    models = history(3)
    publisher, follower, _ = begun(tmp_path, models[0])
    reader = Mirror(tmp_path / PLACE)
    seen = reader.update()
    assert seen is not None
    changes = seen.changes()
    next(changes)
    publisher.publish(models[1])
    follower.update()
    with pytest.raises(VersionError, match=r"another version was written to .* while version 0"):
        list(changes)
    again = reader.update()
    assert again is not None
    assert again.base is None
    assert sum(len(change.indices) for change in again.changes()) > 300
    publisher.publish(models[2])
    follower.update()
    after = reader.update()
    assert after is not None
    kept = [change.values.clone() for change in after.changes() if change.values is not None]
    publisher.publish(models[0])
    follower.update()
    for values, change in zip(kept, after.changes(), strict=True):
        assert change.values is not None
        assert torch.equal(values, change.values), "what changed is in memory of its own"


def test_files_of_a_mirror_that_vanish(tmp_path: Path) -> None:
    """Without those that tell what changed, all is told; without weights, that they lack."""
    models = history(3)
    publisher, follower, worker = begun(tmp_path, models[0])
    publisher.publish(models[1])
    follower.update()
    (places,) = (tmp_path / PLACE).glob("changes-*")
    names = worker.mirror._folder.names()
    places.unlink()
    with patch.object(type(worker.mirror._folder), "names", lambda _: names):
        seen = worker.load()
    assert seen is not None
    assert seen.base is None
    assert same(worker.weights, models[1])
    (tmp_path / PLACE / "model.safetensors").unlink()
    with pytest.raises(VersionError, match=r"lacks model.safetensors, which it says it has"):
        Worker(tmp_path / PLACE).load()


def test_what_is_no_mirror(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no mirror in .*; start a Follower"):
        Mirror(tmp_path / "nothing")
    (tmp_path / PAGE).write_bytes(bytes(128))
    with pytest.raises(FormatError, match="no page of a mirror"):
        Mirror(tmp_path)
    Publisher(tmp_path / "store").publish({"w": torch.ones(3)})
    assert Follower(tmp_path / "store", tmp_path).update() is not None
    Worker(tmp_path).load()
    with pytest.raises(InputError, match=r"store is a store; keep the mirror in a folder of its"):
        Follower(tmp_path / "store", tmp_path / "store")


def test_what_a_follower_cannot_do_leaves_the_mirror(tmp_path: Path) -> None:
    models = history(3)
    publisher, follower, worker = begun(tmp_path, models[0])
    first = follower.version
    with (
        patch.object(follower, "_write", side_effect=AssertionError),
        pytest.raises(VersionError, match="there is no version 9"),
    ):
        follower.update(9)
    index = tmp_path / "store" / "index.json"
    kept = index.read_bytes()
    index.unlink()
    with pytest.raises(VersionError, match="its index has vanished"):
        follower.update()
    index.write_bytes(kept)
    assert follower.version == first
    version = publisher.publish(models[1])
    write = Folder.write

    def full(folder: Folder, name: str, parts: Iterable[bytes | memoryview]) -> int:
        if name.startswith("changes"):
            raise OSError(errno.ENOSPC, "no space")
        return write(folder, name, parts)

    with patch.object(Folder, "write", full):
        assert follower.update() == version
    seen = worker.load()
    assert seen is not None
    assert seen.base is None
    assert same(worker.weights, models[1])
    follower.close()
    with pytest.raises(InputError, match="this follower is closed"):
        follower.update()
    follower.reopen()
    assert follower.update() is None
    publisher.publish(models[2])
    with patch.object(follower, "_begin", side_effect=AssertionError):
        follower.update()
    seen = worker.load()
    assert seen is not None
    assert seen.base == version


def test_what_changes_as_a_whole_is_not_noted(tmp_path: Path) -> None:
    """Places would be longer than the weights, which readers are told whole."""
    model: Model = {"w": torch.zeros(1 << 12, dtype=torch.bfloat16)}
    publisher, follower, worker = begun(tmp_path, model)
    for number in range(3):
        model = {"w": torch.full((1 << 12,), number + 1.0, dtype=torch.bfloat16)}
        publisher.publish(model)
        follower.update()
        seen = worker.load()
        assert seen is not None
        assert seen.base is None
        assert same(worker.weights, model)
        assert not list((tmp_path / PLACE).glob("changes-*"))


def test_a_mirror_is_a_checkpoint(tmp_path: Path) -> None:
    """Others may lay files beside the weights, which stay there."""
    first, *_ = history(1)
    place = tmp_path / PLACE
    place.mkdir()
    (place / "config.json").write_text("{}")
    publisher, follower, _ = begun(tmp_path, first)
    publisher.publish({"w": torch.ones(3)})
    (place / f"coming.{'0' * 16}.part").write_bytes(b"of one that was killed")
    follower.update()
    assert {file.name for file in place.iterdir()} == {
        ".lock",
        "config.json",
        PAGE,
        "model.safetensors",
    }
    with safe_open(place / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("w"), torch.ones(3))


def test_processes_of_a_host_go_together(tmp_path: Path) -> None:
    """One follows; another one takes its place when it ends, or fails."""
    models = history(5)
    publisher = Publisher(tmp_path / "store")
    several = [HostSubscriber(tmp_path / "store", tmp_path / PLACE) for _ in range(3)]

    def load(each: HostSubscriber, number: int) -> list[bool]:
        told = [seen.base is None for seen in each.updates(number)]
        assert each.version is not None
        assert each.version.number == number
        assert same(each.tensors, models[number])
        return told

    with ThreadPoolExecutor(3) as pool:
        for number, model in enumerate(models):
            publisher.publish(model)
            told = list(pool.map(load, several, [number] * 3))
            assert told == [[number == 0]] * 3
            assert list(pool.map(load, several, [number] * 3)) == [[]] * 3
            if number % 2:
                several[number % 3] = HostSubscriber(tmp_path / "store", tmp_path / PLACE)
                assert load(several[number % 3], number) == [True]
        asked = [pool.submit(load, each, 9) for each in several]
        for each in asked:
            with pytest.raises(VersionError, match="there is no version 9"):
                each.result(60)
        assert list(pool.map(load, several, [4] * 3)) == [[]] * 3
        other = Publisher(tmp_path / "other run")
        for _ in models:
            other.publish({"w": torch.ones(3)})
        stranger = HostSubscriber(tmp_path / "other run", tmp_path / PLACE)
        assert [seen.version for seen in stranger.updates(4)] == [other.version]
        assert list(pool.map(load, several, [4] * 3)) == [[]] * 3
    assert load(several[0], 3) == [True]
    with (
        Folder(tmp_path / PLACE).alone(),
        patch("sparcel.products.delta.follower._PATIENCE", 0.01),
        pytest.raises(VersionError, match=r"is at version 3 .*, and did not go to 4"),
    ):
        list(several[1].updates(4))
    shutil.rmtree(tmp_path / PLACE)
    for number in (4, 3):
        assert [load(each, number) for each in several] == [[True]] * 3


@pytest.mark.parametrize("damage", ["a weight", "weights", "page", "all of the page"])
def test_a_mirror_that_a_crash_has_torn(tmp_path: Path, damage: str) -> None:
    models = history(1)
    begun(tmp_path, models[0])[1].close()
    file = tmp_path / PLACE / (PAGE if "page" in damage else "model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if damage == "a weight":
        file.write_bytes(data)
    elif damage == "page":
        file.write_bytes(bytes(len(data)))
    elif damage == "weights":
        file.unlink()
    else:
        file.write_bytes(b"")
    for _ in range(2):
        worker = HostSubscriber(tmp_path / "store", tmp_path / PLACE)
        assert [seen.base for seen in worker.updates(0)] == [None]
        assert same(worker.tensors, models[0])


# ---- kills

_processes = multiprocessing.get_context("forkserver")


def following(folder: Path) -> None:
    torch.set_num_threads(1)
    follower = Follower(folder / "store", folder / PLACE)
    while True:
        follower.update()


@pytest.mark.slow
def test_followers_that_are_killed(tmp_path: Path) -> None:
    """At any moment: a worker sees versions that were published, and in the end the last one."""
    random.seed(0)
    models = [first := {"w": torch.zeros(1 << 18, dtype=torch.int16)}]
    publisher = Publisher(tmp_path / "store", anchor_every=1000)
    sums = {publisher.publish(first)}
    Follower(tmp_path / "store", tmp_path / PLACE).close()
    worker, seen = Worker(tmp_path / PLACE), 0
    for _ in range(6):
        follower = _processes.Process(target=following, args=(tmp_path,))
        follower.start()
        until = time.monotonic() + 2.5 + 2 * random.random()
        while time.monotonic() < until:
            new = copied(models[-1])
            new["w"][random.randrange(9) :: 7] += 1
            models.append(new)
            sums.add(publisher.publish(new))
            with patch.object(mirror, "_PATIENCE", 0.2):
                try:
                    found = worker.load()
                except VersionError:
                    continue
            if found is not None:
                assert found.version in sums
                seen += 1
        follower.kill()
        follower.join()
    Follower(tmp_path / "store", tmp_path / PLACE).update()
    worker.load()
    assert same(worker.weights, models[-1])
    assert seen > 10
