"""Readers of some tensors, or of slices of these: they have what a whole reader has of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_hex
from shutil import copytree
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparcel.errors import InputError, SparcelError, VersionError
from sparcel.products.delta import (
    Change,
    Folder,
    Publisher,
    Store,
    Subscriber,
    assign_,
    read_index,
    store_at,
)
from sparcel.products.stores import Ranged
from tests.delta.histories import sums_of
from tests.delta.pairs import CODES, LAYOUTS, SHARES, Model, Recipe, chunks_of, laid_out, same

Only = dict[str, Any]
ALL = slice(None)


def cut(model: Mapping[str, Tensor], only: Only) -> Model:
    """Return what a reader is to have of whole tensors."""
    return {name: model[name][only[name]] for name in only}


def check(subscriber: Subscriber, models: list[Model], only: Only) -> None:
    """The weights are those of the version that they say."""
    assert subscriber.version is not None
    wanted = cut(models[subscriber.version.number], only)
    assert same(subscriber.tensors, wanted)
    assert {n: t.dtype for n, t in subscriber.tensors.items()} == {
        n: t.dtype for n, t in wanted.items()
    }
    subscriber.verify()


# ---- what is read


@st.composite
def bounds(draw: st.DrawFn, size: int) -> slice:
    bound = st.none() | st.integers(-size - 1, size + 1)
    return slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1])))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Draw rows, or a cut along one dimension, before which there is all or one of each."""
    if not shape or draw(st.booleans()):
        return ... if draw(st.booleans()) or not shape else draw(bounds(shape[0]))
    dim = draw(st.integers(0, len(shape) - 1))
    before = [draw(st.sampled_from([ALL, slice(0, 1), slice(-1, None)])) for _ in shape[:dim]]
    return (*before, draw(bounds(shape[dim])), *[ALL] * draw(st.integers(0, len(shape) - dim - 1)))


DTYPES = (torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn)
recipes = st.builds(
    Recipe,
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from((0, 1, 65, 600, 3000)),
    step=st.sampled_from(("next", "few", "any", "alike")),
    share=st.sampled_from(SHARES),
    seed=st.integers(0, 9),
    rank=st.integers(0, 3),
)


@dataclass
class Case:
    """Versions, how they are published, and what a reader has of them."""

    recipes: list[Recipe]
    changes: list[tuple[str, float, bool]]
    only: Only
    code: str
    apart: bool
    layout: str | None
    chunk_bytes: int

    def models(self) -> list[Model]:
        """Make the versions, the first two tensors of which are tied."""
        made = [[one.pair()[0] for one in self.recipes]]
        for step, share, _ in self.changes:
            new = (
                replace(one, step=step, share=share * (one.seed % 3 > 0)) for one in self.recipes
            )
            made.append([one.pair()[1] for one in new])
        return [{f"t.{i}": t for i, t in enumerate(ts)} | {"tied": ts[0]} for ts in made]

    @contextmanager
    def small(self) -> Iterator[None]:
        """Make chunks, blocks and reads small, as if tensors were large."""
        with ExitStack() as stack:
            stack.enter_context(chunks_of(self.chunk_bytes))
            for where in ("files", "slicing"):
                stack.enter_context(
                    patch(f"sparcel.products.delta.{where}.CHUNK_BYTES", self.chunk_bytes)
                )
            stack.enter_context(patch("sparcel.products.delta.files._NEAR", 100))
            stack.enter_context(patch.object(Ranged, "_HEAD", 100))
            yield


@st.composite
def cases(draw: st.DrawFn) -> Case:
    made = draw(st.lists(recipes, min_size=1, max_size=4))
    code = draw(st.sampled_from(CODES))
    whole = code == "exponents"
    only: Only = {}
    for i, one in enumerate(made):
        if i == 0 or draw(st.booleans()):
            only[f"t.{i}"] = ... if whole else draw(cuts(one.shape))
    if draw(st.booleans()):
        only["tied"] = only["t.0"]
    change = st.tuples(
        st.sampled_from(("next", "any", "alike")), st.sampled_from(SHARES), st.booleans()
    )
    return Case(
        made,
        draw(st.lists(change, min_size=1, max_size=4)),
        only,
        code,
        whole or draw(st.booleans()),
        draw(st.none() | st.sampled_from(LAYOUTS)),
        draw(st.sampled_from((256, 1000, 4 << 20))),
    )


def rebuilt(whole: Model, changes: Iterable[Change]) -> None:
    """Write changes to whole tensors."""
    for change in changes:
        if change.name not in whole:
            whole[change.name] = torch.zeros(change.shape, dtype=change.dtype)
        # Of a slice not all is told, though it is new.
        assign_(whole, [replace(change, new=False, tied_to=None)])


@given(cases())
def test_slices_are_those_of_whole_tensors(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    """Whatever is cut, changes, and how; also in place, undone, and as changes are told."""
    models, only, seen = case.models(), case.only, Model()
    held: Model = {}
    if case.layout is not None:
        blank = cut({name: torch.zeros_like(one) for name, one in models[0].items()}, only)
        held = {name: laid_out(one, case.layout) for name, one in blank.items()}
        held |= {"tied": held["t.0"]} if "tied" in held else {}
    with case.small():
        store = Folder(tmp_path_factory.mktemp("store"))
        publisher = Publisher(store, code=case.code, apart=case.apart, anchor_every=3)
        publisher.publish(models[0])
        subscriber = Subscriber(store, held or None, only=only)
        for model, (*_, waits) in zip(models, [*case.changes, ("", 0.0, False)], strict=True):
            if model is not models[0]:
                publisher.publish(model)
            if waits and model is not models[0]:
                continue
            update = subscriber.update()
            assert update is not None
            check(subscriber, models, only)
            rebuilt(seen, update.changes())
            assert same(cut(seen, only), subscriber.tensors)
            with suppress(VersionError):
                subscriber.rollback()
                check(subscriber, models, only)
                subscriber.update()
                check(subscriber, models, only)
        assert subscriber.version == publisher.version
    assert all(subscriber.tensors[name] is one for name, one in held.items())


# ---- tensors that come, go or are tied


def test_tied_tensors_are_asked_for_together(tmp_path: Path) -> None:
    weights = torch.arange(40.0).view(10, 4)
    Publisher(tmp_path).publish({"embedding": weights, "head": weights})
    subscriber = Subscriber(tmp_path, only={"embedding": ALL, "head": ALL})
    subscriber.update()
    assert subscriber.tensors["head"] is subscriber.tensors["embedding"]
    others: list[Only] = [{"head": ...}, {"head": slice(0, 2), "embedding": ...}]
    for only in others:
        with pytest.raises(InputError, match="head is tied to embedding; only= must have the same"):
            Subscriber(tmp_path, only=only).update()


A, B = torch.arange(12.0).view(4, 3), torch.ones(4, 3)
OTHERS: dict[str, Model] = {
    "gone": {"a": A},
    "reshaped": {"a": A, "b": B.view(3, 4), "z": A},
    "another dtype": {"a": A, "b": B.int(), "z": A},
    "tied": {"a": A, "b": A, "z": A},
    "untied": {"a": A, "b": B, "z": A.clone()},
    "tied otherwise": {"a": A, "b": B, "z": B},
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("apart", [False, True])
def test_a_delta_with_other_tensors_is_passed_by(tmp_path: Path, what: str, apart: bool) -> None:
    """The next whole model takes a reader along."""
    only = {"a": slice(1, 3), "b": slice(1, 3), "z": slice(1, 3)}
    models = [{"a": A, "b": B, "z": A}, OTHERS[what], {"a": A + 1, "b": B + 1, "z": B + 1}]
    models.append({"a": A + 2, "b": B + 2, "z": B + 1})
    publisher = Publisher(tmp_path, code="steps", apart=apart, anchor_every=2)
    subscriber = Subscriber(tmp_path, only=only)
    for number, model in enumerate(models):
        publisher.publish(model)
        with nullcontext() if number != 1 else pytest.raises(VersionError, match="no files lead"):
            subscriber.update()
        check(subscriber, models, only)
        assert subscriber.version == sums_of(models)[0 if number == 1 else number]


# ---- what is refused


ONES = torch.ones(2, 3)
WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "other names": ({"b": ONES}, {"a": slice(0, 2)}, VersionError, "'b' that the version lacks"),
    "fewer": ({"a": ONES}, {"a": slice(0, 2), "b": ...}, VersionError, "weights lack 'b'"),
    "other shape": ({"a": ONES}, {"a": slice(0, 1)}, VersionError, r"'a' is .*\[1, 3\] there"),
    "a module": (nn.Linear(3, 3), {"weight": ...}, InputError, "a module must have all tensors"),
    "nothing": (None, {}, InputError, "only= tells by name"),
    "no names": (None, ["a"], InputError, "only= tells by name"),
    "a number": (None, {"a": 1}, InputError, "only= has 1 for a"),
    "a list": (None, {"a": [slice(0, 1)]}, InputError, "only= has .* for a"),
    "a step": (None, {"a": slice(0, 4, 2)}, InputError, "only= has slice.0, 4, 2. for a"),
    "dots in a tuple": (None, {"a": (..., slice(0, 1))}, InputError, "only= has .* for a"),
    "a bound": (None, {"a": slice(0, 1.5)}, InputError, "only= has .* for a"),
    "too many": (None, {"a": (ALL,) * 3}, InputError, r"has 3 slices for a, of \[4, 3\]"),
    "of a scalar": (None, {"s": ALL}, InputError, r"has 1 slices for s, of \[\]"),
    "a block": (None, {"c": (slice(0, 2),) * 3}, InputError, "cuts c along several dimensions"),
    "missing": (None, {"a": ..., "x": ...}, VersionError, "has no tensors x"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_no_reader_can_have(tmp_path: Path, what: str) -> None:
    tensors, only, error, match = WRONG[what]
    model = {"a": A, "b": ONES, "s": torch.tensor(1.0), "c": torch.ones(3, 3, 3)}
    Publisher(tmp_path).publish(model)
    with pytest.raises(error, match=match):
        Subscriber(tmp_path, tensors, only=only).update()
    assert bool((ONES == 1).all())


@pytest.mark.parametrize("apart", [False, True])
def test_places_that_depend_on_weights_of_others(tmp_path: Path, apart: bool) -> None:
    """A chunk of the code exponents takes all that it tells of, so the error tells of others."""
    old, new = Recipe(torch.bfloat16, 3000).pair()
    models = [{"a": old, "b": old.clone()}, {"a": new, "b": new.clone()}]
    publisher = Publisher(tmp_path, apart=apart)
    publisher.publish(models[0])
    wholes: Only = {"a": ...}
    every, some = Subscriber(tmp_path, only=wholes), Subscriber(tmp_path, only={"a": slice(9, 99)})
    for one in (every, some):
        one.update()
    publisher.publish(models[1])
    for one in (some, every)[: 1 if apart else 2]:
        with pytest.raises(InputError, match=r'apart=True for .* and with code="steps"'):
            one.update()
        assert one.version == sums_of(models)[0]
        check(one, models, {"a": slice(9, 99)} if one is some else wholes)
    if apart:
        every.update()
        check(every, models, wholes)


def test_packed_values_are_told_as_steps_of_what_is_whole(tmp_path: Path) -> None:
    old, new = Recipe(torch.uint8, 600, step="nibble").pair()
    whole: Only = {"a": ...}
    publisher = Publisher(tmp_path, code="steps", apart=True)
    publisher.publish({"a": old})
    every, some = Subscriber(tmp_path, only=whole), Subscriber(tmp_path, only={"a": slice(0, 9)})
    for one in (every, some):
        one.update()
    publisher.publish({"a": new})
    every.update()
    check(every, [{"a": old}, {"a": new}], whole)
    with pytest.raises(InputError, match=r'code="steps" for others .of packed values, "values".'):
        some.update()
    check(some, [{"a": old}], {"a": slice(0, 9)})


@pytest.mark.parametrize("rows", [slice(0, 0), slice(9, 9), slice(99, 9), slice(3000, None)])
def test_a_slice_without_elements_needs_no_others(tmp_path: Path, rows: slice) -> None:
    old, new = Recipe(torch.bfloat16, 3000).pair()
    publisher, subscriber = Publisher(tmp_path, apart=True), Subscriber(tmp_path, only={"a": rows})
    for model in ({"a": old}, {"a": new}):
        publisher.publish(model)
        subscriber.update()
        assert subscriber.version == publisher.version


# ---- damage


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write a file with another header."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(change(json.loads(data[8:end])), separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def some_models() -> list[Model]:
    return Case(
        [
            Recipe(torch.bfloat16, 30, seed=1, rank=2),
            Recipe(torch.int8, 12, seed=2),
            Recipe(torch.float32, 9, seed=4),
            Recipe(torch.float32, 0, seed=5, rank=1),
        ],
        [("next", 0.5, False), ("any", 1.0, False), ("next", 0.2, False)],
        *({}, "", True, None, 0),
    ).models()


SOME: Only = {"t.0": slice(1, 4), "tied": slice(1, 4), "t.2": ..., "t.3": ...}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the versions of `some_models`, to be copied."""
    path = tmp_path_factory.mktemp("four") / "store"
    publisher = Publisher(path, code="steps", apart=True, anchor_every=2)
    for model in some_models():
        publisher.publish(model)
    return path


@settings(max_examples=100)  # a flip that matters is rare
@given(
    st.integers(0, 99),
    st.booleans(),
    st.integers(0, 1 << 16),
    st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 255]),
    st.sampled_from([None, 0, 1]),
)
def test_any_byte_that_is_flipped(
    tmp_path_factory: pytest.TempPathFactory,
    four: Path,
    which: int,
    header: bool,
    at: int,
    flip: int,
    since: int | None,
) -> None:
    """Weights are those of a version, as it was published, or an error tells."""
    path = copytree(four, tmp_path_factory.mktemp("flipped") / "store")
    models = some_models()
    subscriber = Subscriber(path, only=SOME)
    if since is not None:
        subscriber.update(since)
    files = sorted(path.glob("*.safetensors"))
    file = files[which % len(files)]
    data = bytearray(file.read_bytes())
    data[at % (8 + int.from_bytes(data[:8], "little") if header else len(data))] ^= flip
    file.write_bytes(data)
    with suppress(SparcelError):
        subscriber.update()
        assert subscriber.version == sums_of(models)[-1]
    if subscriber.version is not None:
        check(subscriber, models, SOME)


@pytest.mark.parametrize("what", ["numbers", "names"])
def test_chunks_are_those_that_a_file_lists(tmp_path: Path, four: Path, what: str) -> None:
    """Also where two are exchanged: under one another's keys, or by what the keys tell of."""
    path = copytree(four, tmp_path / "store")
    models = some_models()
    subscriber = Subscriber(path, only=SOME)
    subscriber.update(2)
    (file,) = path.glob("delta-0000000002-*")

    def exchanged(header: dict[str, Any]) -> dict[str, Any]:
        one, two, *rest = [key for key in header if key != "__metadata__"]
        assert "t." in one and "t." in two
        if what == "numbers":
            return header | {one: header[two], two: header[one]}
        others = {
            one.replace(".0.", ".1.", 1): header[two],
            two.replace(".1.", ".0.", 1): header[one],
        }
        return {key: header[key] for key in ("__metadata__", *rest)} | others

    rewrite(file, exchanged)
    with pytest.raises(VersionError, match=r"delta-0000000002-\S* cannot be used"):
        subscriber.update()
    assert subscriber.version == sums_of(models)[2]
    check(subscriber, models, SOME)


def test_an_anchor_without_sums_is_for_whole_readers(tmp_path: Path, four: Path) -> None:
    """Nobody can check a part of it."""
    path = copytree(four, tmp_path / "store")
    for file in path.glob("anchor-*"):
        rewrite(file, lambda header: header | {"__metadata__": without_sums(header)})
    with pytest.raises(VersionError, match=r"anchor-\S* cannot be used"):
        Subscriber(path, only=SOME).update()
    whole = Subscriber(path)
    whole.update()
    assert same(whole.tensors, some_models()[-1])


def without_sums(header: dict[str, Any]) -> dict[str, str]:
    new = ("sums", "listed_crc")
    return {key: one for key, one in header["__metadata__"].items() if key not in new}


def test_a_damaged_whole_model_is_passed_by(tmp_path: Path, four: Path) -> None:
    """Also where a tensor's name is damaged, which the sums do not tell of at once."""
    path = copytree(four, tmp_path / "store")
    file = max(path.glob("anchor-*"))
    file.write_bytes(file.read_bytes().replace(b'"t.2"', b'"t.6"'))
    for only in (None, SOME):
        subscriber = Subscriber(path, only=only)
        subscriber.update()
        assert subscriber.version == sums_of(some_models())[-1]


# ---- how much is read


class Plain:
    """A store that can do no more than it must."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def read(self, name: str) -> memoryview:
        if name not in self.files:
            raise FileNotFoundError(name)
        return memoryview(bytearray(self.files[name]))

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        self.files[name] = b"".join(parts)
        return len(self.files[name])

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def names(self) -> list[str]:
        return sorted(self.files)

    def alone(self) -> AbstractContextManager[object]:
        return nullcontext()


@pytest.mark.parametrize("where", ["folder", "memory", "plain"])
def test_little_more_is_read(tmp_path: Path, where: str) -> None:
    """Of eight tensors one; a store that reads whole files reads these."""
    if where == "memory":
        pytest.importorskip("fsspec")
    places: dict[str, Any] = {"folder": tmp_path, "memory": f"memory://{token_hex(8)}/run"}
    store: Store = store_at(places.get(where, Plain()))
    pairs = [Recipe(torch.float32, 1 << 16, step="any", share=0.5, seed=i).pair() for i in range(8)]
    publisher = Publisher(store, code="steps", apart=True)
    wanted: list[Only] = [{"t.3": ...}, {"t.3": slice(-999, None)}]
    for i, only in enumerate(wanted):
        subscriber, taken = Subscriber(store, only=only), 0
        for side in (0, 1):
            if i == 0:
                publisher.publish({f"t.{n}": pair[side] for n, pair in enumerate(pairs)})
            update = subscriber.update(side)
            assert update is not None
            taken += update.bytes
            assert same(subscriber.tensors, {"t.3": pairs[3][side][only["t.3"]]})
        total = sum(entry.bytes for entry in read_index(store).entries)
        assert taken == total if where == "plain" else taken < total / 4


@pytest.mark.filterwarnings("error")
def test_torch_does_not_warn_of_what_is_read_in_parts(tmp_path: Path) -> None:
    Publisher(tmp_path).publish({"a": torch.ones(1 << 15)})
    torch.set_warn_always(True)  # or it would warn once
    try:
        Subscriber(tmp_path, only={"a": ...}).update()
    finally:
        torch.set_warn_always(False)


class Endless(SimpleHTTPRequestHandler):
    """A web server whose whole models have no end, or only one that is far away."""

    sent = 0

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if "anchor" not in self.path:
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            while Endless.sent < 64 << 20:
                Endless.sent += self.wfile.write(bytes(1 << 20))


def test_no_more_is_taken_than_the_index_says(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    Publisher(tmp_path).publish({"a": A})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Endless, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            with pytest.raises((SparcelError, OSError)):
                Subscriber(f"http://127.0.0.1:{server.server_port}", only={"a": ...}).update()
        finally:
            server.shutdown()
    assert Endless.sent < 32 << 20
