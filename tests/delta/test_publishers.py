"""What publishers refuse, and what they leave alone: each other's versions and foreign files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel.errors import FormatError, InputError, VersionError
from sparcel.products.delta import Folder, Publisher, Subscriber, Version, read_index
from sparcel.products.delta.index import INDEX
from tests.delta.histories import Failing, history
from tests.delta.pairs import same

WEIGHTS = {"w": torch.arange(10.0)}
WRITER = "0123456789abcdef"


# ---- one publisher at a time


class Slow(Folder):
    """A folder in which something else happens right before the index is written."""

    meanwhile: Any = None

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        if name == INDEX and self.meanwhile:
            self.meanwhile()
        return super().write(name, parts)


def test_no_version_is_lost_to_another_publisher(tmp_path: Path) -> None:
    """Between a look at the index and its change nobody else changes it."""
    store, models = Slow(tmp_path), history(3)
    one = Publisher(store)
    one.publish(models[0])
    other = Publisher(tmp_path)
    told: list[Version | Exception] = []

    def publish() -> None:
        try:
            told.append(other.publish(models[1]))
        except VersionError as error:
            told.append(error)

    thread = Thread(target=publish)

    def meanwhile() -> None:
        store.meanwhile = None
        thread.start()
        thread.join(0.3)

    store.meanwhile = meanwhile
    version = one.publish(models[2])
    thread.join()
    assert "another publisher has written" in str(told[0])
    subscriber = Subscriber(store)
    subscriber.update()
    assert subscriber.version == version
    assert same(subscriber.tensors, models[2])
    assert read_index(store).names < set(store.names())


def test_what_the_index_lists_is_there_also_while_old_files_are_removed(tmp_path: Path) -> None:
    removed = []

    class Watched(Folder):
        def remove(self, name: str) -> None:
            assert name not in read_index(self).names
            removed.append(name)
            super().remove(name)

    publisher = Publisher(Watched(tmp_path), anchor_every=2, lag=1)
    for weights in history(8):
        publisher.publish(weights)
    assert removed


class Meanwhile(Folder):
    """A folder in which something else happens while a file is written, or right after."""

    def __init__(self, path: Path, name: str, within: bool, other: Any) -> None:
        super().__init__(path)
        self._name, self._within, self._other = name, within, other

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        if not name.startswith(self._name):
            return super().write(name, parts)
        self._name = "nothing"

        def written() -> Iterator[bytes | memoryview]:
            yield from parts
            if self._within:
                self._other()

        size = super().write(name, written())
        if not self._within:
            self._other()
        return size


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(("name", "before"), [("anchor", 0), ("anchor", 2), ("delta", 2)])
def test_a_publisher_whose_files_another_one_removes(
    tmp_path: Path, name: str, before: int, within: bool
) -> None:
    """The other one publishes while a file is written, which it takes for left behind."""
    models = history(5)
    for model in models[:before]:
        Publisher(tmp_path).publish(model)
    store = Meanwhile(tmp_path, name, within, lambda: Publisher(tmp_path).publish(models[4]))
    one = Publisher(store, anchor_every=2 if name == "anchor" else 9)
    with pytest.raises(VersionError, match="another publisher has written to"):
        one.publish(models[3])
    reader = Subscriber(tmp_path)
    reader.update()
    assert same(reader.tensors, models[4])
    assert set(Folder(tmp_path).names()) == {INDEX, *read_index(tmp_path).names}


def test_a_publisher_removes_nothing_that_another_one_has_begun_since(tmp_path: Path) -> None:
    """The first one has committed; the second one follows while the first one looks for files."""
    models, others = history(3), iter([Publisher, None])

    class Looking(Folder):
        def names(self) -> list[str]:
            if read_index(tmp_path).newest != start and (other := next(others, None)):
                other(tmp_path).publish(models[2])
            return super().names()

    start = Publisher(tmp_path).publish(models[0])
    with suppress(VersionError):
        Publisher(Looking(tmp_path)).publish(models[1])
    assert read_index(tmp_path).names <= set(Folder(tmp_path).names())


def test_a_lock_that_fails(tmp_path: Path) -> None:
    failure = OSError(errno.EIO, "broken")
    with patch("fcntl.flock", side_effect=failure), pytest.raises(OSError, match="broken"):
        Publisher(tmp_path).publish(WEIGHTS)


def test_a_file_system_without_locks(tmp_path: Path) -> None:
    with patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "no locks")):
        Publisher(tmp_path).publish(WEIGHTS)
    assert read_index(tmp_path).newest is not None


@pytest.mark.parametrize("name", [INDEX, ".lock", "base"])
def test_nothing_leads_out_of_a_store(name: str, tmp_path: Path) -> None:
    store, victim = tmp_path / "store", tmp_path / "victim"
    (tmp_path / "there").mkdir()
    store.symlink_to(tmp_path / "there")  # which it may be itself
    for plant in (lambda path: path.symlink_to(victim), os.mkfifo):
        plant(store / name)
        with pytest.raises(FormatError, match=f"{name} is a (link|pipe)"):
            Publisher(store, base=store / "base").publish(WEIGHTS)
        (store / name).unlink()
    assert not victim.exists()
    Publisher(store, base=store / "base").publish(WEIGHTS)
    assert Folder(store).names() == sorted([INDEX, "base", *read_index(store).names])


def test_a_delta_that_is_a_link_is_passed_by(tmp_path: Path) -> None:
    publisher, reader = Publisher(tmp_path, anchor_every=2), Subscriber(tmp_path)
    for number, model in enumerate(history(3)):
        publisher.publish(model)
        if not number:
            reader.update()
    for name in read_index(tmp_path).names:
        if name.startswith("delta"):
            (tmp_path / name).rename(tmp_path / "moved")
            (tmp_path / name).symlink_to(tmp_path / "moved")
    reader.update()
    assert reader.version == publisher.version


def test_an_index_and_a_base_keep_their_mode(tmp_path: Path) -> None:
    for model in history(2):
        Publisher(tmp_path, base=tmp_path / "base").publish(model)
        for name in (INDEX, "base"):
            (tmp_path / name).chmod(0o600)
    Publisher(tmp_path, base=tmp_path / "base").publish(WEIGHTS)
    for name in (INDEX, "base"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


# ---- stores that do not hold what is written to them


class Other(Folder):
    """A folder that has other bytes in one file than those that are written, or no such file."""

    def __init__(self, path: Path, name: str, other: bytes | None) -> None:
        super().__init__(path)
        self._name, self._other = name, other

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        if not name.startswith(self._name):
            return super().write(name, parts)
        if self._other is not None:
            super().write(name, [self._other])
        return len(b"".join(parts))


class Plain:
    """A store with the five methods of a `Store`, and no others."""

    def __init__(self, folder: Folder) -> None:
        self.read, self.write, self.remove = folder.read, folder.write, folder.remove
        self.names, self.alone = folder.names, folder.alone


@pytest.mark.parametrize("of", [Folder, Plain])
@pytest.mark.parametrize("name", ["anchor", INDEX])
@pytest.mark.parametrize("kept", [None, 0, 20, 1000])
def test_a_store_that_does_not_hold_the_first_version_is_told(
    tmp_path: Path, of: Any, name: str, kept: int | None
) -> None:
    """It has no such file, only the beginning of an older one, or all of that."""
    Publisher(tmp_path / "older").publish(WEIGHTS, 3)
    (old,) = [path.read_bytes() for path in (tmp_path / "older").glob(f"{name}*")]
    folder = Other(tmp_path / "run", name, None if kept is None else old[:kept])
    publisher = Publisher(folder if of is Folder else of(folder))
    if of is Plain and name == "anchor" and kept is not None:
        publisher.publish(WEIGHTS)  # it would have to be read whole
        return
    errors = InputError, FormatError, VersionError  # another one's index is that of a publisher
    with pytest.raises(errors, match=f"{name}|another publisher"):
        publisher.publish(WEIGHTS)
    assert publisher.version is None


# ---- files of others


def test_foreign_files_stay(tmp_path: Path) -> None:
    """Only names that publishers give are theirs, and only files."""
    foreign = {"delta-notes.txt", "anchor-list.csv", f"{INDEX}.bak", "delta-5.safetensors"}
    ours = {
        f"delta-0000000001-0000000002-{WRITER}.safetensors",
        f"delta-0000000001-0000000002-{WRITER}.0003.safetensors.{WRITER}.part",
        f"anchor-12345678901-{WRITER}.0012.safetensors",
        f"{INDEX}.{WRITER}.part",
    }
    Publisher(tmp_path).publish(WEIGHTS)
    publisher = Publisher(tmp_path)
    for name in foreign | ours:
        (tmp_path / name).write_bytes(b"left")
    (tmp_path / "delta-old").mkdir()
    folder = tmp_path / f"anchor-0000000001-{WRITER}.safetensors"
    folder.mkdir()
    for _ in range(2):
        publisher.publish(WEIGHTS)
    there = set(Folder(tmp_path).names())
    assert there == {INDEX, *read_index(tmp_path).names} | foreign
    assert folder.is_dir()


@given(st.lists(st.sampled_from(["delta-", "anchor-", INDEX, ""]), max_size=8))
def test_nothing_is_left_of_publications_that_failed(
    tmp_path_factory: pytest.TempPathFactory, fails: list[str]
) -> None:
    store = Failing(tmp_path_factory.mktemp("store"))
    publisher = Publisher(store, anchor_every=2, lag=1)
    for name, model in zip([*fails, ""], history(len(fails) + 1), strict=True):
        store.fail = (name, "after") if name else None
        try:
            publisher.publish(model)
        except OSError:
            assert name
    assert set(store.names()) == {INDEX, *read_index(store).names}


# ---- an index that is lost or torn


def test_a_store_that_lost_its_index(tmp_path: Path) -> None:
    """Nothing begins anew over what is there: the index may come back."""
    models = history(4)
    publisher = Publisher(tmp_path)
    for model in models[:3]:
        publisher.publish(model)
    index = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).unlink()
    before = Folder(tmp_path).names()
    for publish in (lambda: Publisher(tmp_path), lambda: publisher.publish(models[3])):
        with pytest.raises(VersionError, match=r"holds deltas, but not the index.json .*; restore"):
            publish()
    assert Folder(tmp_path).names() == before
    (tmp_path / INDEX).write_bytes(index)
    assert publisher.publish(models[3]).number == 3


def test_a_publisher_that_was_killed_at_its_first_version(tmp_path: Path) -> None:
    """What it leaves is no store that lost its index."""
    store = Failing(tmp_path)
    store.fail = (INDEX, "before")
    with pytest.raises(OSError, match="failed before"):
        Publisher(store).publish(WEIGHTS)
    (anchor,) = store.names()
    Publisher(tmp_path).publish(WEIGHTS)
    assert anchor not in store.names()


def test_a_torn_index_says_what_to_do(tmp_path: Path) -> None:
    Publisher(tmp_path).publish(WEIGHTS)
    index = tmp_path / INDEX
    index.write_bytes(index.read_bytes()[:50])
    with pytest.raises(FormatError, match=r"restore index.json from a copy, or publish to"):
        Publisher(tmp_path)


# ---- what cannot be published


WRONG: dict[str, tuple[dict[Any, Any], str]] = {
    "nothing": ({}, "no tensors to publish"),
    "a number": ({"a": 3}, "^a is no tensor but int"),
    "no name": ({"a": torch.zeros(6).half().view(torch.complex32)}, "^a is .*torch.complex32"),
    "too long": ({"a": torch.zeros(3).to(torch.complex128)}, "^a is .*torch.complex128"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "^a is .*torch.sparse_coo"),
    "a name of the format": ({"__metadata__": torch.ones(3)}, r"^'__metadata__' is a name that"),
    "half a character": ({"w.\ud800": torch.ones(3)}, r"^'w.\\ud800' is a name that"),
    "no text": ({3: torch.ones(3)}, "^3 is no name"),
    "meta": ({"a": torch.zeros(3, device="meta")}, "^a is .*meta"),
}


@pytest.mark.parametrize("bracketed", [False, True])
@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_published_is_refused_first(
    tmp_path: Path, what: str, bracketed: bool
) -> None:
    wrong, error = WRONG[what]
    publisher = Publisher(tmp_path, anchor_every=2, bracketed=bracketed)
    for number in range(3):
        with pytest.raises(InputError, match=error):
            publisher.publish(wrong and {**WEIGHTS, **wrong})
        assert read_index(tmp_path).newest == publisher.version
        assert publisher.publish(WEIGHTS).number == number


NAMES = ["", " ", "\0", "é", "e\u0301", '"', "\\", "\n", "../x", "chunk.0", "ties", "\U0001f642"]


def test_any_text_is_a_name(tmp_path: Path) -> None:
    """In whole models and in deltas, and for others who read the files."""
    publisher, subscriber = Publisher(tmp_path, anchor_every=2), Subscriber(tmp_path)
    weights = {name: torch.full((3,), float(i)) for i, name in enumerate(NAMES)}
    for count in (3, len(NAMES), len(NAMES)):
        named = {name: weights[name] for name in NAMES[:count]}
        publisher.publish(named)
        weights["é"] += 1
        subscriber.update()
        subscriber.verify()
        assert subscriber.tensors.keys() == named.keys()
    load = pytest.importorskip("safetensors.torch").load_file
    (anchor,) = [e.names[0] for e in read_index(tmp_path).entries if e.kind == "anchor"][1:]
    assert load(tmp_path / anchor).keys() == weights.keys()


@pytest.mark.parametrize(
    ("where", "begun"), [("files._MOST_HEADER", False), ("header._MOST", True)]
)
def test_names_that_no_file_holds(tmp_path: Path, where: str, begun: bool) -> None:
    """Readers refuse longer headers, of whole models as of deltas, so they are not written."""
    publisher = Publisher(tmp_path)
    if begun:
        publisher.publish(WEIGHTS)
    before = publisher.version
    too_long = patch(f"sparcel.products.delta.{where}", 5000)
    with too_long, pytest.raises(InputError, match=r"names .*take .* bytes.* shorten them"):
        publisher.publish({"w" * 6000: torch.ones(3)})
    assert publisher.version == before == read_index(tmp_path).newest
    publisher.publish(WEIGHTS)


def test_numbers_have_63_bits(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    with pytest.raises(InputError, match="number must"):
        publisher.publish(WEIGHTS, 1 << 63)
    publisher.publish(WEIGHTS, 12)
    with pytest.raises(InputError, match=r"got 3; versions are numbered upwards, and the last"):
        publisher.publish(WEIGHTS, 3)
    publisher.publish(WEIGHTS, (1 << 63) - 1)
    with pytest.raises(InputError, match="number must"):
        publisher.publish(WEIGHTS)
    subscriber = Subscriber(Folder(tmp_path))
    subscriber.update()
    assert same(subscriber.tensors, WEIGHTS)


# ---- where things are


@pytest.mark.parametrize("place", [None, 3, b"run"])
def test_other_things_are_no_stores(place: Any) -> None:
    for use in (Publisher, Subscriber, read_index):
        with pytest.raises(InputError, match=r"^a store is a path, a URL or a Store, got"):
            use(place)


@pytest.mark.parametrize("name", ["anchor_every", "lag"])
@pytest.mark.parametrize("value", [-1, 1.5, "3", None])
def test_paces_are_whole_numbers(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} must"):
        Publisher(tmp_path, **{name: value})


def test_stores_are_named_by_paths(tmp_path: Path) -> None:
    for place in (tmp_path, str(tmp_path), Folder(tmp_path)):
        version = Publisher(place).publish(WEIGHTS)
        assert read_index(place).newest == version


def test_the_name_of_a_new_folder_is_durable(tmp_path: Path) -> None:
    flushed = []

    def fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    with patch("os.fsync", fsync):
        Folder(tmp_path / "a" / "b").write("file", [b"data"])
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(flushed)


def test_a_base_for_which_there_is_no_room(tmp_path: Path) -> None:
    """Memory that is mapped from a file without room kills whoever writes to it."""
    full = patch("os.posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left"))
    base = tmp_path / "base"
    publisher = Publisher(tmp_path / "run", base=base)
    with full, pytest.raises(OSError, match=r"No space left, for 64 bytes: '.*/base'"):
        publisher.publish(WEIGHTS)
    assert not base.exists()
    publisher.publish(WEIGHTS)
    assert base.stat().st_blocks


def test_a_base_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "run", base=tmp_path / "none" / "base")
    with pytest.raises(FileNotFoundError, match="none/base"):
        publisher.publish(WEIGHTS)


def test_a_base_of_nothing(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "run", base=tmp_path / "base")
    assert publisher.publish({"empty": torch.zeros(0, 3)}).number == 0
