"""Versions in object stores, and from a web server that knows nothing of them."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.errors import InputError, MissingDependencyError, VersionError
from sparcel.products.delta import Folder, Publisher, Store, Subscriber, read_index, store_at
from sparcel.products.delta.index import INDEX
from sparcel.products.stores import ExclusiveStore
from tests.delta.histories import history, sums_of
from tests.delta.pairs import same

pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Serve S3 from this process, and return the URL of a bucket."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server", reason="moto and flask serve S3")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with patch.dict(os.environ, settings):
            boto3.client("s3").create_bucket(Bucket="versions")
            yield "s3://versions"
    finally:
        server.stop()


@pytest.fixture(params=["memory", "s3"])
def place(request: pytest.FixtureRequest) -> str:
    """Return the URL of a place with nothing in it."""
    root = "memory:/" if request.param == "memory" else request.getfixturevalue("s3")
    return f"{root}/{secrets.token_hex(4)}/of-a-run"


class Web(SimpleHTTPRequestHandler):
    """A web server that breaks off where it is told."""

    most: int | None = None

    def log_message(self, *_: Any) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        outputfile.write(source.read()[: self.most])


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder by HTTP."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Web, directory=folder)) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def follow(store: Store, others: Store, subscribers: int = 2) -> None:
    """Publish to a store; others see the versions in it, whole, and nothing else is left."""
    models = history(9)
    sums = sums_of(models)
    publisher = Publisher(store, anchor_every=3, lag=2)
    reading = [Subscriber(others) for _ in range(subscribers)]
    for number, model in enumerate(models):
        if number == 5:
            publisher = Publisher(store, anchor_every=3, lag=2)
        assert publisher.publish(model) == sums[number]
        for who, subscriber in enumerate(reading):
            if number % (who + 1) == 0:
                subscriber.update()
                assert subscriber.version == sums[number]
                assert same(subscriber.tensors, model)
    for subscriber in [*reading, Subscriber(others)]:
        subscriber.update()
        subscriber.verify()
        assert same(subscriber.tensors, models[-1])
    listed = {INDEX, *(name for entry in read_index(others).entries for name in entry.names)}
    assert set(store.names()) == listed


def test_versions_in_an_object_store(place: str) -> None:
    assert str(store_at(place)) == place
    follow(store_at(place), store_at(f"{place}/"))


def test_files_of_an_object_store(place: str) -> None:
    store = store_at(place)
    assert store.names() == []
    store.remove("nothing")
    with pytest.raises(FileNotFoundError):
        store.read("nothing")
    parts = [b"a" * 1000, memoryview(b"bc"), b""]
    assert store.write("file", parts) == 1002
    assert bytes(store.read("file")) == b"".join(parts)
    assert store.write("file", [b"other"]) == 5
    assert bytes(store_at(place).read("file")) == b"other"
    assert store.names() == ["file"]
    store.remove("file")
    assert store.names() == []
    with pytest.raises(FileNotFoundError):
        store.read("file")


def test_a_reader_that_is_behind_asks_few_times(place: str) -> None:
    """For the index once, and for many deltas at the same time; for one if they are merged."""
    models = history(12)
    store = store_at(place)
    behind, later = Subscriber(store), Subscriber(store)
    publisher = Publisher(store, anchor_every=8, lag=20)
    publisher.publish(models[0])
    behind.update()
    later.update()
    for model in models[1:7]:
        publisher.publish(model)
    with patch.object(store, "read_at_most", wraps=store.read_at_most) as reads:
        assert later.prepare() is not None
    assert len(reads.call_args_list) == 2, "the index, and the next step"
    with patch.object(store, "read_at_most", wraps=store.read_at_most) as reads:
        assert behind.update() is not None
        assert behind.update() is None
    names = [call.args[0] for call in reads.call_args_list]
    assert names.count(INDEX) == 2, "once an update"
    assert len(set(names)) == 7
    assert same(behind.tensors, models[6])
    for model in models[7:]:
        publisher.publish(model)
    with patch.object(store, "read_at_most", wraps=store.read_at_most) as reads:
        later.update()
    assert same(later.tensors, models[-1])
    merged = [name for call in reads.call_args_list if "0000-0000000008" in (name := call.args[0])]
    assert len(merged) == 1
    assert len(reads.call_args_list) == 5, "the index, what is merged up to 8, and three more"


def test_a_bucket_that_does_not_exist_is_told(s3: str) -> None:
    """An empty one is waited for, as is a folder in one."""
    with pytest.raises(InputError, match="there is no bucket misspelt, so nothing can be"):
        Subscriber("s3://misspelt/run").update()
    assert Subscriber(f"{s3}/{secrets.token_hex(4)}/run").update() is None


def creates_once(store: Store) -> None:
    """The first writer of a file wins, and one that fails leaves nothing."""

    def failing() -> Iterable[bytes]:
        yield b"half"
        raise OSError("no more")

    assert isinstance(store, ExclusiveStore)
    with pytest.raises(OSError, match="no more"):
        store.create("file", failing())
    assert store.names() == []
    assert store.create("file", [b"a", memoryview(b"bc")])
    assert not store.create("file", [b"other"])
    assert bytes(store.read("file")) == b"abc"
    assert store.names() == ["file"]
    store.remove("file")
    assert store.create("file", [])
    assert bytes(store.read("file")) == b""


def test_the_first_writer_wins(place: str) -> None:
    creates_once(store_at(place))


def test_the_first_writer_of_a_folder_wins(tmp_path: Path) -> None:
    creates_once(Folder(tmp_path / "made"))


def test_links_of_file_systems_that_have_none_or_repeat_them(tmp_path: Path) -> None:
    link = os.link

    def repeated(*paths: Path) -> None:
        link(*paths)
        link(*paths)

    with patch("os.link", side_effect=repeated):
        assert Folder(tmp_path).create("file", [b"a"])
    with (
        patch("os.link", side_effect=PermissionError(errno.EPERM, "not permitted")),
        pytest.raises(InputError, match="without hard links"),
    ):
        Folder(tmp_path).create("other", [b"a"])
    assert Folder(tmp_path).names() == ["file"]


@pytest.mark.parametrize("size", [10, 6 << 20])
def test_a_write_that_fails_leaves_what_was_there(place: str, size: int) -> None:
    """The larger file is sent in several parts."""
    store = store_at(place)
    store.write("file", [b"old"])

    def failing() -> Iterable[bytes]:
        yield bytes(size)
        yield bytes(size)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        store.write("file", failing())
    assert bytes(store.read("file")) == b"old"
    assert store.names() == ["file"]
    assert store.write("file", [bytes(size), b"new"]) == size + 3
    assert bytes(store.read("file")) == bytes(size) + b"new"


def test_another_publisher_is_seen(place: str) -> None:
    """Nothing of what a store held before is remembered."""
    models = history(3)
    one, other = Publisher(store_at(place)), Publisher(store_at(place))
    one.publish(models[0])
    with pytest.raises(VersionError, match="another publisher has written to"):
        other.publish(models[1])
    assert Publisher(store_at(place)).version == one.version


@given(st.lists(st.sampled_from(["fail", "publish"]), max_size=8))
def test_a_publisher_goes_on_in_memory(steps: list[str]) -> None:
    """A store that fails when a file is closed, as object stores do."""
    place = f"memory://{secrets.token_hex(8)}"
    store, models = store_at(place), history(len(steps) + 1)
    publisher = Publisher(store, anchor_every=2, lag=1)
    for number, step in enumerate(steps):
        if step == "fail":
            closing = "fsspec.implementations.memory.MemoryFile.commit"
            with (
                patch(closing, side_effect=OSError("it failed")),
                pytest.raises(OSError, match="it failed"),
            ):
                publisher.publish(models[number])
        else:
            publisher.publish(models[number])
    publisher.publish(models[-1])
    subscriber = Subscriber(store_at(place))
    subscriber.update()
    assert same(subscriber.tensors, models[-1])


def test_versions_from_a_web_server(tmp_path: Path) -> None:
    """A subscriber needs nothing but files."""
    pytest.importorskip("aiohttp")
    with served(tmp_path) as url:
        assert Subscriber(store_at(url)).update() is None
        follow(Folder(tmp_path), store_at(url))
        (late, lost) = Subscriber(store_at(f"{url}/")), Subscriber(store_at(f"{url}/not/here"))
        late.update()
        assert late.version == read_index(Folder(tmp_path)).newest
        assert lost.update() is None


def test_a_connection_that_breaks(tmp_path: Path) -> None:
    """The error is an OSError, and nothing is written to the weights."""
    pytest.importorskip("aiohttp")
    models = history(2)
    publisher = Publisher(Folder(tmp_path))
    publisher.publish(models[0])
    with served(tmp_path) as url:
        subscriber = Subscriber(store_at(url))
        subscriber.update()
        publisher.publish(models[1])
        for most in (0, 100, 600):
            with patch.object(Web, "most", most), pytest.raises(OSError, match="cannot be read"):
                subscriber.update()
            assert same(subscriber.tensors, models[0])
        subscriber.update()
        assert same(subscriber.tensors, models[1])


def test_errors_are_those_of_files() -> None:
    """Whatever a package of fsspec raises; who looks for a store that is away expects OSError."""
    store = store_at(f"memory://{secrets.token_hex(8)}")
    memory = "fsspec.implementations.memory.MemoryFileSystem"
    calls: dict[str, Callable[[], object]] = {
        "ls": store.names,
        "rm_file": lambda: store.remove("a"),
        "open": lambda: store.write("a", [b"a"]),
        "get_file": lambda: store.read("a"),
    }
    for name, call in calls.items():
        failing = patch(f"{memory}.{name}", side_effect=RuntimeError("odd"))
        with failing, pytest.raises(OSError, match=r"memory://.*odd"):
            call()


def test_a_web_server_that_is_away() -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        Subscriber(store_at("http://127.0.0.1:9/run")).update()


def test_a_publisher_cannot_write_to_a_web_server(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with served(tmp_path) as url:
        publisher = Publisher(store_at(url))
        with pytest.raises(InputError, match="cannot be written to"):
            publisher.publish(history(1)[0])
    assert not list(tmp_path.iterdir())


def test_places_that_are_none() -> None:
    with pytest.raises(InputError, match="nothing://here is no store: Protocol not known"):
        store_at("nothing://here")
    missing = patch("fsspec.core.url_to_fs", side_effect=ImportError("Install s3fs to access S3"))
    with missing, pytest.raises(MissingDependencyError, match=r"s3://a/b needs .*Install s3fs"):
        store_at("s3://a/b")
