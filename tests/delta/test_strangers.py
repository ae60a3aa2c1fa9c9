"""Stores in other hands: what they send has bounds, and what is secret stays so."""

from __future__ import annotations

import gzip
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel.errors import FormatError, InputError, SparcelError, VersionError
from sparcel.products.delta import (
    Folder,
    Publisher,
    Subscriber,
    apply_,
    encode,
    files,
    read_index,
    store_at,
)
from sparcel.products.delta import index as indices
from sparcel.products.delta.chunk import read_chunk
from sparcel.products.delta.files import File, delta_file
from sparcel.products.delta.index import INDEX, write_index
from sparcel.products.stores import remote
from tests.delta.histories import history
from tests.delta.pairs import same
from tests.delta.repacking import repacked

SECRET = "hunter2SECRET"


# ---- far stores


@contextmanager
def served(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Answers(BaseHTTPRequestHandler):
    """A web server that means harm, in the way that the path's first part names."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        with suppress(OSError):
            getattr(self, self.path.split("/")[1])()

    def _begin(self, **headers: str) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def packed(self) -> None:
        data = gzip.compress(bytes(1 << 22), 1)
        self._begin(Content_Encoding="gzip", Content_Length=str(len(data)))
        self.wfile.write(data)

    def endless(self) -> None:
        self._begin(Transfer_Encoding="chunked")
        while True:
            self.wfile.write(b"%x\r\n" % (1 << 18) + bytes(1 << 18) + b"\r\n")

    def drips(self) -> None:
        self._begin(Transfer_Encoding="chunked")
        while True:
            self.wfile.write(b"1\r\n \r\n")
            time.sleep(0.01)

    def silent(self) -> None:
        self._begin(Content_Length="9")
        time.sleep(3)

    def elsewhere(self) -> None:
        self.send_response(302)
        self.send_header("Location", f"{self.path}?signature={SECRET}")
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("packed", "the index of .* is wrong"),
        ("endless", r"index.json is longer than the \d+ bytes"),
        ("drips", r"index.json cannot be read .*OSError: \d+ bytes of index.json came in"),
        ("silent", "index.json cannot be read .*Timeout"),
        ("elsewhere", "index.json cannot be read .*TooManyRedirects"),
    ],
)
def test_answers_of_a_web_server_end(way: str, error: str) -> None:
    """At once or in a while, and with few bytes; the error tells no place that it was led to."""
    pytest.importorskip("aiohttp")
    arrived = []

    def seen(path: Path) -> memoryview:
        arrived.append(path.stat().st_size)
        return memoryview(path.read_bytes())

    with (
        served(Answers) as url,
        patch.object(indices, "_MOST_BYTES", 1 << 20),
        patch.object(remote, "_SECONDS", 0.5),
        patch.object(remote, "read_whole", seen),
        pytest.raises((FormatError, OSError), match=error) as raised,
    ):
        Subscriber(f"{url}/{way}").update()
    assert sum(arrived) < 1 << 18
    assert len(str(raised.value)) < 700
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_a_place_that_tells_nothing_while_it_copies(tmp_path: Path) -> None:
    """What is too long is refused, at best before it is copied."""
    pytest.importorskip("fsspec")
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(indices._MOST_BYTES + 1)
    store = remote.Remote(f"file://{tmp_path}")
    for size in (indices._MOST_BYTES + 1, None):
        with (
            patch.object(store._files, "size", return_value=size),
            patch.object(store._files, "get_file", wraps=store._files.get_file) as copying,
            pytest.raises(FormatError, match=r"index.json is longer than the"),
        ):
            read_index(store)
        assert copying.called == (size is None)


class Signed(SimpleHTTPRequestHandler):
    """A web server that answers to a signature and to a login."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.path, _, query = self.path.partition("?")
        if query != f"sig={quote(SECRET + '/+', safe='')}&b=1" or not self.headers["Authorization"]:
            self.send_error(403)
        else:
            super().do_GET()


def test_signed_urls_of_a_web_server_work(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    models, publisher = history(3), Publisher(tmp_path)
    with served(partial(Signed, directory=tmp_path)) as url:
        login = url.replace("//", f"//user:{SECRET}@")
        place = f"{login}/?sig={quote(SECRET + '/+', safe='')}&b=1"
        subscriber, unsigned = Subscriber(place), Subscriber(f"{login}/?sig={SECRET}")
        assert subscriber.update() is None
        for model in models:
            publisher.publish(model)
            subscriber.update()
            assert same(subscriber.tensors, model)
        with pytest.raises(OSError, match=f"cannot be read from {url}.*403") as raised:
            unsigned.update()
        assert SECRET not in "".join(traceback.format_exception(raised.value))
    with pytest.raises(InputError, match=r"memory://a is given with a query, which only web"):
        store_at(f"memory://a?key={SECRET}")


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@127.0.0.1:9/x",
        f"http://127.0.0.1:9/x?X-Amz-Signature={SECRET}",
        f"nosuch://user:{SECRET}@host/x",
        f"nosuch://{SECRET}@host/x#{SECRET}",
        f"sftp://user:{SECRET}@127.0.0.1:9/x",
        f"ftp://user:{SECRET}@127.0.0.1:9/x",
        f"s3://KEY:{SECRET}/a@bucket/x",
    ],
)
def test_no_error_shows_what_is_secret_in_a_url(url: str) -> None:
    """Nor its traceback, nor the store as text."""
    pytest.importorskip("aiohttp")
    for use in (
        lambda: Subscriber(url).update(),
        lambda: Publisher(url).publish({"a": torch.ones(3)}),
        lambda: pytest.fail(str(store_at(url)), pytrace=False),
    ):
        with pytest.raises((SparcelError, OSError, pytest.fail.Exception)) as raised:
            use()
        assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_a_place_that_can_never_hold_anything_is_told(tmp_path: Path) -> None:
    """The folder around it is not there, as after a slip of the pen; a publisher makes it."""
    pytest.importorskip("fsspec")
    near, far = tmp_path / "rums" / "run", f"file://{tmp_path}/rums/run"
    for place in (near, far):
        with pytest.raises(InputError, match=r"is in no folder that exists|there is no folder"):
            Subscriber(place).update()
        with pytest.raises(InputError):
            read_index(place)
    publisher = Publisher(near)
    near.parent.mkdir()
    for place in (near, far):
        assert Subscriber(place).update() is None
    publisher.publish(history(1)[0])
    for place in (near, far):
        assert Subscriber(place).update() is not None


# ---- forged files


def forged(folder: Path, change: Callable[[dict[str, Any]], None], times: int = 1) -> Subscriber:
    """Put another delta of repeated chunks into a store; return who would read it next."""
    weights, publisher = {"a": torch.zeros(1000)}, Publisher(folder)
    publisher.publish(weights)
    subscriber = Subscriber(folder)
    subscriber.update()
    weights["a"][3] += 1
    publisher.publish(weights)
    (path,) = folder.glob("delta*")
    file = File(path.read_bytes(), path.name)
    chunk = bytes(file.chunks()[0])
    made = repacked(chunk, lambda header, _: change(header))
    parts = delta_file([made] * times, file.version("base"), file.version())
    path.write_bytes(b"".join(map(bytes, parts)))
    index = read_index(folder)
    *entries, last = index.entries
    entries.append(replace(last, bytes=path.stat().st_size))
    write_index(Folder(folder), replace(index, entries=tuple(entries)))
    return subscriber


BOMBS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "names": (lambda header: header.update(untied=["a"] * 1_000_000), "longer than"),
    "lists": (lambda header: header.update(untied=[[]] * 70_000, x="[" * 99_000), "longer than"),
    "tensors": (lambda header: header.update(tensors=[[1, ["a"], [1], []]] * 4000), "longer than"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_header_that_unpacks_to_much_is_refused(tmp_path: Path, what: str) -> None:
    """Before it is parsed."""
    change, error = BOMBS[what]
    subscriber = forged(tmp_path, change, 3)
    (path,) = tmp_path.glob("delta*")
    with (
        patch("json.loads", wraps=json.loads) as parsed,
        pytest.raises(FormatError, match=f"a chunk's header is wrong.*{error}"),
    ):
        read_chunk(File(path.read_bytes(), path.name).chunks()[0])
    assert all(len(call.args[0]) < 10_000 for call in parsed.call_args_list)
    with pytest.raises(VersionError, match="no files lead"):
        subscriber.update()


def test_a_header_has_few_brackets() -> None:
    """Of whatever name: a writer refuses what a reader would."""
    name = "".join(map(chr, torch.randint(0x100, 0x9000, (1 << 17,)).tolist())).replace("[", "")
    named = {"[" * (1 << 17) + name: torch.zeros(1)}
    with pytest.raises(InputError, match=r"with \d+ brackets, and may take \d+ with 131072"):
        list(encode(named, {}))


def test_what_would_take_much_memory_is_not_parsed(tmp_path: Path) -> None:
    text = b"[" + b"[]," * (1 << 18) + b"[]]"
    Publisher(tmp_path).publish({"a": torch.ones(1)})
    (tmp_path / INDEX).write_bytes(text)
    with patch("json.loads") as parsed:
        with pytest.raises(FormatError, match=r"the index of .* has 262146 brackets in"):
            read_index(tmp_path)
        with pytest.raises(FormatError, match=r"x has a wrong header.* has 262146 brackets in"):
            File(len(text).to_bytes(8, "little") + text, "x")
    assert not parsed.called


def test_as_many_tensors_as_a_model_has_are_read() -> None:
    """With names and shapes as short as can be, where brackets are most of a header."""
    count = 50_000
    header = files._header({str(i): ("F32", (), 4) for i in range(count)}, {}, True)
    assert len(File(header + bytes(4 * count), "x")._tensors) == count
    with pytest.raises(InputError, match="few brackets"):
        files._header({"[" * (1 << 18): ("F32", (), 4)}, {}, True)


@given(st.lists(st.text("ab/", min_size=1, max_size=3), unique=True, max_size=5), st.integers(0, 9))
def test_whatever_names_shrink_to_is_read_again(stems: list[str], power: int) -> None:
    """Also those that a packer makes a thousandth of."""
    names = [stem * 4**power for stem in stems]
    new = {name: torch.ones(2) for name in names if len(name) < 1 << 18}
    weights: dict[str, torch.Tensor] = {}
    apply_(weights, encode(new, {}))
    assert same(weights, new)


def test_elements_that_come_twice_in_different_pieces_are_refused(tmp_path: Path) -> None:
    """More of them than a tensor has would cost more memory than the receiver's weights."""
    (one,) = encode({"w": torch.ones(9)}, {"w": torch.zeros(9)}, code="values")
    chunk = read_chunk(one)
    (piece,) = chunk.pieces
    both = [
        replace(chunk, pieces=(replace(piece, first=first, row=8, stride=8, count=8),), part=first)
        for first in (0, 1)
    ]
    both[0] = replace(both[0], last=False)
    with pytest.raises(VersionError, match="has elements of w twice"):
        apply_({"w": torch.zeros(9)}, both)


@pytest.mark.parametrize("told", [10, 1 << 50])
def test_a_file_is_as_long_as_it_may_be(tmp_path: Path, told: int) -> None:
    """As the index says, and, where weights are given, about as long as these at most."""
    path, weights = tmp_path / "store", {"a": torch.ones(1000)}
    Publisher(path).publish(weights)
    index = read_index(path)
    (entry,) = index.entries
    write_index(Folder(path), replace(index, entries=(replace(entry, bytes=told),)))
    asked = []
    with patch.object(
        Folder, "read_at_most", lambda store, name, most: asked.append(most) or store.read(name)
    ):
        for given_ in (None, {"a": torch.zeros(1000)}):
            with suppress(VersionError):
                Subscriber(path, given_).update()
    asked = [most for most in asked if most != indices._MOST_BYTES]
    assert asked[0] == told
    assert asked[-1] <= (1 << 20) + 20_000
    if told == 10:
        with pytest.raises(VersionError, match="no files lead"):
            Subscriber(path).update()


@pytest.mark.parametrize(
    ("what", "value"),
    [("shape", [True]), ("shape", [1 << 62, 4]), ("data_offsets", [False, 4]), ("shape", "1")],
)
def test_a_file_with_an_odd_header_is_passed_by(tmp_path: Path, what: str, value: object) -> None:
    weights, publisher = {"s": torch.ones(1)}, Publisher(tmp_path, anchor_every=1, lag=3)
    publisher.publish(weights)
    publisher.publish({"s": torch.zeros(1)})
    path = max(tmp_path.glob("anchor*"))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["s"][what] = value
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(FormatError, match="has a wrong header"):
        File(path.read_bytes(), path.name)
    subscriber = Subscriber(tmp_path)
    subscriber.update()
    assert not subscriber.tensors["s"].any()


@pytest.mark.parametrize(
    ("what", "value"),
    [("time", math.inf), ("time", -1), ("bytes", 1 << 63), ("elements", True), ("changed", 1.5)],
)
def test_an_index_of_odd_numbers_is_refused(tmp_path: Path, what: str, value: object) -> None:
    Publisher(tmp_path).publish({"a": torch.ones(1)})
    told = json.loads((tmp_path / INDEX).read_text())
    told["entries"][0][what] = value
    (tmp_path / INDEX).write_text(json.dumps(told))
    with pytest.raises(FormatError, match=r"the index of .* is wrong"):
        read_index(tmp_path)


def test_an_error_quotes_little_of_what_is_wrong(tmp_path: Path) -> None:
    """Of an index in which one bit is flipped, of a long name, or of one with escapes."""
    publisher, weights = Publisher(tmp_path, lag=300, anchor_every=999), {"a": torch.zeros(3)}
    for _ in range(30):
        weights["a"] += 1
        publisher.publish(weights)
    data = bytearray((tmp_path / INDEX).read_bytes())
    data[len(data) // 2] |= 0x80
    (tmp_path / INDEX).write_bytes(data)
    with pytest.raises(FormatError, match="UnicodeDecodeError") as raised:
        read_index(tmp_path)
    assert len("".join(traceback.format_exception(raised.value))) < 6000
    assert len(str(raised.value)) < 500
    name = f"\x1b[2J\nnothing is wrong{'x' * 9000}"
    chunks = list(encode({name: torch.ones(3)}, {name: torch.zeros(3)}))
    for there in ({}, {name: torch.ones(3)}, {name: torch.ones(4)}):
        with pytest.raises(VersionError, match=r"\\x1b\[2J\\nnothing is wrong") as refused:
            apply_(dict(there), chunks)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 500
