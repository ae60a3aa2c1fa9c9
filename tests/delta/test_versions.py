"""Publishers and subscribers of a folder: whatever happens, weights are a version, or told."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from shutil import copytree
from threading import main_thread
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sparcel.core.comm import Communicator
from sparcel.errors import FormatError, InputError, VersionError
from sparcel.products.delta import (
    Change,
    Folder,
    Publisher,
    Subscriber,
    Update,
    Version,
    assign_,
    decode,
    read_index,
    version_of,
)
from sparcel.products.delta.applying import write_in_turn
from sparcel.products.delta.chunk import Chunk
from sparcel.products.delta.decoding import Found
from sparcel.products.delta.files import File, delta_file
from sparcel.products.delta.index import INDEX
from sparcel.products.delta.parts import Part
from tests.delta.histories import (
    DAMAGES,
    Failing,
    damage,
    first_model,
    history,
    sums_of,
    trained,
)
from tests.delta.pairs import CODES, Model, bits_of, chunks_of, copied, models, same
from tests.kernels.paths import ISAS, using

Folders = Callable[[], Path]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return lambda: tmp_path_factory.mktemp("store")


def publish(publisher: Publisher, models: list[Model]) -> list[Version]:
    return [publisher.publish(model) for model in models]


# ---- where subscribers are


actions = st.sampled_from(["update", "update", "wait", "wait", "rollback", "goto", "join"])


@given(
    st.lists(st.tuples(st.integers(0, 2), actions, st.integers(0, 99)), max_size=20),
    st.integers(1, 6),
    st.integers(0, 4),
    st.sampled_from(CODES),
)
def test_subscribers_that_come_and_go(
    folders: Folders, steps: list[tuple[int, str, int]], anchor_every: int, lag: int, code: str
) -> None:
    """They fall behind, join late, roll back and go to older versions, and hold what they say."""
    store = Folder(folders())
    publisher = Publisher(store, code=code, anchor_every=anchor_every, lag=lag)
    models = history(len(steps) + 1)
    sums = sums_of(models)
    subscribers: list[Subscriber] = [Subscriber(store)]

    def check(subscriber: Subscriber) -> None:
        if subscriber.version is not None:
            assert subscriber.version == sums[subscriber.version.number]
            assert same(subscriber.tensors, models[subscriber.version.number])
            subscriber.verify()

    assert publisher.publish(models[0]) == sums[0]
    for number, (who, action, where) in enumerate(steps, 1):
        assert publisher.publish(models[number]) == sums[number]
        subscriber = subscribers[who % len(subscribers)]
        before = subscriber.version
        match action:
            case "update":
                update = subscriber.update()
                assert update is not None and update.version == sums[number]
            case "rollback":
                with suppress(VersionError):
                    assert subscriber.rollback() == subscriber.version != before
            case "goto":
                wanted = where % (number + 1)
                try:
                    update = subscriber.update(wanted)
                    assert subscriber.version == sums[wanted]
                    assert (update is None) == (before == sums[wanted])
                except VersionError:
                    assert wanted < number - lag  # it may be pruned
            case "join":
                subscribers.append(Subscriber(store, copied(first_model(9))))
                subscribers[-1].update()
        for one in subscribers:
            check(one)
    for one in subscribers:
        one.update()
        assert one.version == sums[len(steps)]
        check(one)
        assert one.update() is None


@pytest.mark.parametrize("lag", [0, 3])
def test_anchors_merged_deltas_and_what_is_kept(tmp_path: Path, lag: int) -> None:
    store = Folder(tmp_path)
    publisher = Publisher(store, anchor_every=5, lag=lag)
    models = history(14)
    behind = Subscriber(store)
    for number, model in enumerate(models):
        publisher.publish(model)
        if number == 5:
            behind.update()
    index = read_index(store)
    kinds = [(e.kind, e.base and e.base.number, e.version.number) for e in index.entries]
    assert ("anchor", None, 10) in kinds
    assert kinds[0] == (("anchor", None, 10) if lag < 4 else ("anchor", None, 5))
    listed = {INDEX, *(name for entry in index.entries for name in entry.names)}
    assert set(store.names()) == listed
    for entry in index.entries:
        (name,) = entry.names
        assert entry.bytes == (tmp_path / name).stat().st_size
        assert entry.elements == sum(tensor.numel() for tensor in models[0].values())
    # Whoever is behind all of them begins with the anchor.
    steps = [update.version.number for update in behind.updates()]
    assert steps == [10, 11, 12, 13]
    assert same(behind.tensors, models[-1])


def test_a_version_has_as_many_elements_as_its_tensors(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    a, b = torch.ones(10), torch.ones(50)
    for model in ({"a": a}, {"a": a, "b": b}, {"b": b}):
        publisher.publish(model)
    told = [(entry.elements, entry.changed) for entry in read_index(tmp_path).entries]
    assert told == [(10, 10), (60, 50), (50, 0)]


def test_a_merged_delta_is_the_shorter_way(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    publisher = Publisher(store, anchor_every=6, lag=20)
    models = history(9)
    publisher.publish(models[0])
    first, late = Subscriber(store), Subscriber(store)
    first.update()
    publish(publisher, models[1:])
    steps = [(update.base, update.version.number) for update in first.updates()]
    assert steps[0] == (version_of(models[0], 0), 6)
    assert [number for _, number in steps] == [6, 7, 8]
    assert same(first.tensors, models[8])
    first.rollback()
    assert same(first.tensors, models[7])
    with pytest.raises(VersionError, match="only the last one"):
        first.rollback()
    (whole, *_) = late.updates()
    assert whole.base is None and whole.changed == first_elements(models[0])
    with pytest.raises(VersionError, match="no delta to undo"):
        Subscriber(store).rollback()
    assert whole.bytes == next(e.bytes for e in read_index(store).entries if e.kind == "anchor")


def first_elements(model: Model) -> int:
    return sum(tensor.numel() for tensor in model.values())


# ---- damaged files


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the versions of `history`, to be copied."""
    path = tmp_path_factory.mktemp("eight") / "store"
    publish(Publisher(path, anchor_every=3, lag=20), history(8))
    return path


@given(
    st.integers(0, 99),
    st.lists(st.tuples(st.integers(0, 99), st.sampled_from(DAMAGES)), min_size=1, max_size=5),
    st.integers(0, 7),
    st.booleans(),
)
def test_damaged_files_are_passed_by_or_told(
    folders: Folders,
    eight: Path,
    seed: int,
    damages: list[tuple[int, str]],
    behind: int,
    in_place: bool,
) -> None:
    """Weights are those of a version, bit for bit, at the newest one unless an error says why."""
    path, dice = folders() / "store", random.Random(seed)
    copytree(eight, path)
    store, models = Folder(path), history(8)
    sums = sums_of(models)
    subscriber = Subscriber(store, copied(first_model(7)) if in_place else None)
    subscriber.update(behind)
    files = sorted(path.glob("*.safetensors"))
    for which, how in damages:
        file = files[which % len(files)]
        if file.exists():
            damage(file, how, dice)
    try:
        subscriber.update()
        assert subscriber.version == sums[-1]
    except (VersionError, FormatError):
        pass
    assert subscriber.version is not None  # maybe an older one, of which no file leads on
    assert subscriber.version == sums[subscriber.version.number]
    assert same(subscriber.tensors, models[subscriber.version.number])
    # The publisher passes them by as well, and the next anchor takes everybody along.
    again = Publisher(store, anchor_every=1, lag=20)
    for model in (trained(models[-1], 5), trained(models[-1], 6)):
        again.publish(model)
    subscriber.update()
    assert same(subscriber.tensors, trained(models[-1], 6))


@pytest.mark.parametrize("how", DAMAGES)
def test_each_damage_of_each_file(tmp_path: Path, how: str) -> None:
    """Here no other file leads there: the error is typed, and what was reached is a version."""
    models = history(4)
    sums = sums_of(models)
    publish(Publisher(tmp_path / "whole", anchor_every=50), models)
    for which in range(4):
        path = copytree(tmp_path / "whole", tmp_path / str(which))
        file = sorted(path.glob("*.safetensors"))[which]  # the anchor, then the deltas
        damage(file, how, random.Random(which))
        subscriber = Subscriber(Folder(path))
        try:
            subscriber.update()
        except (VersionError, FormatError):
            reached = subscriber.version and subscriber.version.number
            assert reached == (None if which == 0 else which - 1)
        assert subscriber.version in (None, *sums)
        if subscriber.version is not None:
            assert same(subscriber.tensors, models[subscriber.version.number])


def test_an_anchor_that_cannot_be_read_hinders_no_publisher(tmp_path: Path) -> None:
    """What it would have been merged to is left out, and the next anchor comes all the same."""
    models = history(8)
    for how in (*DAMAGES, "weights"):
        store = Folder(tmp_path / how)
        publisher = Publisher(store, anchor_every=3, lag=20)
        publisher.publish(models[0])
        publisher.publish(models[1])
        (anchor,) = (tmp_path / how).glob("anchor-*")
        if how == "weights":  # which only their sum tells
            data = anchor.read_bytes()
            anchor.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        else:
            damage(anchor, how, random.Random(1))
        publish(publisher, models[2:])
        versions = {entry.version for entry in read_index(store).entries}
        assert versions == set(sums_of(models))
        subscriber = Subscriber(store)
        subscriber.update()
        assert same(subscriber.tensors, models[-1])


def test_a_tie_that_was_damaged_is_found(tmp_path: Path) -> None:
    """The sum of a version counts tied tensors once, so names of ties have a checksum."""
    w = torch.arange(50.0)
    Publisher(Folder(tmp_path)).publish({"embedding": w, "head": w})
    (anchor,) = tmp_path.glob("anchor-*")
    data = anchor.read_bytes()
    at = data.index(b"head")
    anchor.write_bytes(data[:at] + b"lead" + data[at + 4 :])
    with pytest.raises(VersionError, match="cannot be used"):
        Subscriber(Folder(tmp_path)).update()


# ---- stores that fail


failures = st.tuples(
    st.sampled_from(["delta-", "anchor-", INDEX]),
    st.sampled_from(["before", "in", "after", "remove"]),
    st.integers(0, 2),
)


@given(st.lists(st.none() | failures, min_size=1, max_size=8), st.integers(1, 3), st.booleans())
def test_a_publisher_goes_on_when_its_store_failed(
    folders: Folders, steps: list[tuple[str, str, int] | None], anchor_every: int, in_file: bool
) -> None:
    """Whatever failed, and however far it came, the next versions are right."""
    store = Failing(folders())
    base = store.path.with_name(f"{store.path.name}-base") if in_file else None
    publisher = Publisher(store, anchor_every=anchor_every, lag=2, base=base)
    subscriber = Subscriber(store)
    model = first_model()
    journal: dict[Version, Model] = {}
    for number, failure in enumerate(steps):
        model = trained(model, number)
        store.fail, store.left = (failure[:2], failure[2]) if failure else (None, 0)
        with suppress(OSError):
            publisher.publish(model, number)
        store.fail = None
        journal[version_of(model, number)] = model
        subscriber.update()
        assert subscriber.version == read_index(store).newest
        if subscriber.version is not None:
            assert same(subscriber.tensors, journal[subscriber.version])
    model = trained(model, 99)
    publisher.publish(model)
    late = Subscriber(store)
    for one in (subscriber, late):
        one.update()
        one.verify()
        assert one.version == publisher.version
        assert same(one.tensors, model)


def test_what_was_published_when_an_anchor_fails(tmp_path: Path) -> None:
    """The version is there, and `version` says so."""
    store, models = Failing(tmp_path), history(3)
    publisher = Publisher(store, anchor_every=1)
    publisher.publish(models[0])
    store.fail = ("anchor-", "in")
    with pytest.raises(OSError, match="failed in"):
        publisher.publish(models[1])
    store.fail = None
    assert publisher.version == version_of(models[1], 1) == read_index(store).newest
    publisher.publish(models[2])
    assert [e.version.number for e in read_index(store).entries if e.kind == "anchor"] == [0, 2]


def test_an_interrupt_while_the_base_follows(tmp_path: Path) -> None:
    """The version is durable by then; the publisher reads it back."""
    store = Folder(tmp_path)
    models = [{name: torch.full((300,), step) for name in "abc"} for step in range(3)]
    publisher = Publisher(store)
    publisher.publish(models[0])

    def half(parts: Mapping[str, Part], chunks: Iterable[Chunk]) -> None:
        write_in_turn(parts, islice(chunks, 2))
        raise KeyboardInterrupt

    with (
        patch("sparcel.products.delta.base.write_in_turn", half),
        chunks_of(2400),
        pytest.raises(KeyboardInterrupt),
    ):
        publisher.publish(models[1])
    assert read_index(store).newest == version_of(models[1], 1)
    publisher.publish(models[2])
    assert read_index(store).entries[-1].base == version_of(models[1], 1)
    subscriber = Subscriber(store)
    subscriber.update()
    assert same(subscriber.tensors, models[2])


def test_an_interrupt_while_a_whole_model_is_written(tmp_path: Path) -> None:
    """The weights are no version then, and nothing claims that they were."""
    store, models = Folder(tmp_path), history(4)
    publisher = Publisher(store, anchor_every=1, lag=0)
    publisher.publish(models[0])
    subscriber = Subscriber(store, copied(models[0]))
    subscriber.update()
    publish(publisher, models[1:])
    real, calls = bits_of, iter([True, True, False])

    def interrupting(tensor: torch.Tensor) -> torch.Tensor:
        if not next(calls, False):
            raise KeyboardInterrupt
        return real(tensor)

    interrupted = patch("sparcel.products.delta.kept.bits_of", interrupting)
    with interrupted, pytest.raises(KeyboardInterrupt):
        subscriber.update()
    assert subscriber.version is None
    subscriber.update()
    assert same(subscriber.tensors, models[3])


# ---- publishers


def test_two_publishers_of_a_store(tmp_path: Path) -> None:
    """The second one to publish raises, and harms nothing that the first has published."""
    store, models = Folder(tmp_path), history(5)
    one = Publisher(store)
    publish(one, models[:2])
    other = Publisher(store)
    assert other.version == one.version
    other.publish(models[2])
    for _ in range(2):
        with pytest.raises(VersionError, match="another publisher has written to"):
            one.publish(first_model(5))
    subscriber = Subscriber(store)
    subscriber.update()
    assert same(subscriber.tensors, models[2])
    other.publish(models[3])
    subscriber.update()
    assert same(subscriber.tensors, models[3])


def test_two_publishers_at_the_same_moment(tmp_path: Path) -> None:
    """One commits before the other, which encodes the version of the same number, writes it."""
    store, models = Folder(tmp_path), history(3)
    one = Publisher(store)
    publish(one, models[:2])
    other = Publisher(store)
    real = one._coded

    def late(*args: Any) -> Any:
        other.publish(models[2])
        return real(*args)

    late_one = patch.object(one, "_coded", late)
    with late_one, pytest.raises(VersionError, match="another publisher"):
        one.publish(first_model(5))
    subscriber = Subscriber(store)
    subscriber.update()
    assert subscriber.version == other.version
    assert same(subscriber.tensors, models[2])


def test_a_publisher_that_only_looks_takes_nothing_away(tmp_path: Path) -> None:
    """Files that are written and not yet committed stay until somebody else has committed."""
    store, models = Folder(tmp_path), history(3)
    one = Publisher(store)
    publish(one, models[:2])
    real = one._index_writer.commit

    def late(*entry: Any) -> None:
        Publisher(store)
        real(*entry)

    with patch.object(one._index_writer, "commit", late):
        one.publish(models[2])
    subscriber = Subscriber(store)
    subscriber.update()
    assert same(subscriber.tensors, models[2])


@given(st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_a_resumed_trainer_with_other_weights(
    folders: Folders, before: int, back: int, in_file: bool
) -> None:
    """It may have gone back to a checkpoint, or have learned more; versions go on."""
    path = folders()
    store, models = Folder(path), history(7)
    publish(Publisher(store, anchor_every=3), models[: before + 1])
    subscriber = Subscriber(store)
    subscriber.update()
    base = path.with_name(f"{path.name}-base") if in_file else None
    publisher = Publisher(store, anchor_every=3, base=base)
    assert publisher.version == version_of(models[before], before)
    for model in models[max(before - back, 0) : before + 3]:
        version = publisher.publish(model)
        subscriber.update()
        assert subscriber.version == version == version_of(model, version.number)
        assert same(subscriber.tensors, model)


def test_numbers_of_versions(tmp_path: Path) -> None:
    store, models = Folder(tmp_path), history(5)
    publisher = Publisher(store, anchor_every=10)
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(InputError, match="number must"):
            publisher.publish(models[0], wrong)  # type: ignore[arg-type]
    assert publisher.publish(models[0], 100).number == 100
    for wrong in (100, 99, -3):
        with pytest.raises(InputError, match="numbered upwards, and the last one is 100"):
            publisher.publish(models[1], wrong)
    assert publisher.publish(models[1], 105).number == 105
    assert publisher.publish(models[2]).number == 106
    assert publisher.publish(models[3], 110).number == 110
    subscriber = Subscriber(store)
    assert [update.version.number for update in subscriber.updates(106)] == [100, 105, 106]
    subscriber.update()
    with pytest.raises(VersionError, match="there is no version 104; the store has 100 to 110"):
        subscriber.update(104)
    assert same(subscriber.tensors, models[3])


def test_anchors_are_counted_in_versions(tmp_path: Path) -> None:
    """Numbers may be those of training steps, with gaps."""
    store = Folder(tmp_path)
    publisher = Publisher(store, anchor_every=3)
    for number, model in enumerate(history(8)):
        publisher.publish(model, 100 * number)
    entries = read_index(store).entries
    assert [e.version.number for e in entries if e.kind == "anchor"] == [0, 300, 600]


def test_nothing_is_published_twice_when_nothing_changes(tmp_path: Path) -> None:
    store, model = Folder(tmp_path), first_model()
    publisher = Publisher(store)
    publish(publisher, [model, model])
    entry = read_index(store).entries[-1]
    assert (entry.kind, entry.changed) == ("delta", 0)
    subscriber = Subscriber(store)
    steps = [(update.version.number, update.changed) for update in subscriber.updates()]
    assert steps == [(0, first_elements(model)), (1, 0)]


# ---- kinds of weights


@given(
    st.lists(models(), min_size=1, max_size=4),
    st.sampled_from(CODES),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_weights(
    folders: Folders,
    pairs: list[tuple[Model, Model]],
    code: str,
    anchor_every: int,
    bracketed: bool,
) -> None:
    """Of any dtype, bits and layout; tensors appear, vanish and change their shape."""
    store = Folder(folders())
    publisher = Publisher(store, code=code, anchor_every=anchor_every, lag=1, bracketed=bracketed)
    subscriber = Subscriber(store)
    for model in [model for pair in pairs for model in pair]:
        if not model or any(t.dtype == torch.complex32 for t in model.values()):
            continue
        version = publisher.publish(model)
        assert version == version_of(model, version.number)
        subscriber.update()
        assert subscriber.version == version
        assert same(subscriber.tensors, model)
    late = Subscriber(store)
    late.update()
    assert same(late.tensors, subscriber.tensors)


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 30, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def train(module: Tied, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in module.parameters():
            weights += 0.01 * torch.randn(weights.shape, generator=generator)
        module.norm.num_batches_tracked += 1


def test_modules_are_kept_in_place(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    here, there = Tied(), Tied()
    parameters = dict(there.named_parameters())
    publisher = Publisher(store, anchor_every=2, lag=0)
    subscriber = Subscriber(store, there)
    for step in range(6):
        train(here, step)
        publisher.publish(here)
        if step != 2:
            subscriber.update()
            subscriber.verify()
            assert same(there.state_dict(), here.state_dict())
    assert all(parameters[name] is one for name, one in there.named_parameters())
    assert there.head.weight is there.embedding.weight


def test_a_module_whose_memory_is_replaced(tmp_path: Path) -> None:
    """As `Module.to` does; the subscriber writes to the weights that are there."""
    store, here, there = Folder(tmp_path), Tied(), Tied()
    publisher, subscriber = Publisher(store, anchor_every=1, lag=0), Subscriber(store, there)
    publisher.publish(here)
    for step in range(3):
        there.load_state_dict({k: v.clone() for k, v in there.state_dict().items()}, assign=True)
        there.head.weight = there.embedding.weight
        subscriber.reload()
        assert same(there.state_dict(), here.state_dict())
        train(here, step)
        publisher.publish(here)
        subscriber.update()
        subscriber.verify()
        assert same(there.state_dict(), here.state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_a_module_with_other_ties_is_refused(tmp_path: Path, tied: bool) -> None:
    """A delta tells a tied tensor once, so the other one would stay behind."""
    here, there = Tied(tied), Tied(not tied)
    before = copied(there.state_dict())
    Publisher(Folder(tmp_path)).publish(here)
    apart, together = "to none", r"to \['embedding.weight'\]"
    there_, here_ = (together, apart) if tied else (apart, together)
    error = f"'head.weight' is tied {there_} there, and {here_} here; begin with"
    mapping: Model = dict(there.state_dict())
    for weights in (there, mapping):
        with pytest.raises(VersionError, match=error):
            Subscriber(tmp_path, weights).update()
        assert same(there.state_dict(), before)
    assert same(mapping, before)


def test_ties_that_come_and_go(tmp_path: Path) -> None:
    """A whole model tells of them."""
    store = Folder(tmp_path)
    publisher, subscriber = Publisher(store), Subscriber(store)
    w, v = torch.arange(100.0), torch.zeros(100)
    versions: list[Model] = [
        {"a": w, "b": w, "c": v},
        {"a": w + 1, "b": w + 2, "c": v},
        {"a": w, "b": v, "c": v},
        {"a": w + 1, "b": v, "c": v},
        {"a": w + 2},
        {"a": w, "b": w},
    ]
    for model in versions:
        version = publisher.publish(model)
        assert version == version_of(model, version.number)
        for one in (subscriber, Subscriber(store)):
            one.update()
            one.verify()
            assert same(one.tensors, model)


def test_a_module_refuses_tensors_that_it_lacks(tmp_path: Path) -> None:
    store, module = Folder(tmp_path), nn.Linear(3, 4)
    publisher, subscriber = Publisher(store, anchor_every=2), Subscriber(store, module)
    publisher.publish(module)
    subscriber.update()
    before = copied(module.state_dict())
    wider = {**copied(before), "other": torch.zeros(2)}
    for error in ("has other tensors than the mod", "version 3 .* the weights lack 'other'; begin"):
        version = publisher.publish(wider)
        with pytest.raises(VersionError, match=error):
            subscriber.update()
        assert same(module.state_dict(), before)
        subscriber = Subscriber(store, module)
        publisher.publish(wider)
    assert read_index(store).newest == Version(version.number + 1, version.sum)


# ---- weights that were given


class Head(nn.Module):
    """Tied as language models are: named parameters have the first name only."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.model.weight


@pytest.mark.parametrize("anchor_every", [1, 9])
def test_whoever_has_one_name_of_a_tied_tensor_follows(tmp_path: Path, anchor_every: int) -> None:
    """In place, and by what updates tell."""
    here, kept, told, other = Head(), Head(), Head(), Head()
    assert set(dict(told.named_parameters())) == {"model.weight"}
    publisher = Publisher(tmp_path, anchor_every=anchor_every, lag=0)
    subscriber = Subscriber(tmp_path)
    in_place = Subscriber(tmp_path, dict(kept.named_parameters()))
    by_owner = Subscriber(tmp_path, {"head.weight": other.head.weight})
    for _ in range(3):
        with torch.no_grad():
            here.head.weight += 1
        publisher.publish(here)
        for update in subscriber.updates():
            assign_(dict(told.named_parameters()), update.changes())
        for one in (in_place, by_owner):
            one.update()
            one.verify()
        for there in (kept, told, other):
            assert same(there.state_dict(), here.state_dict())


def test_tensors_that_were_given_keep_their_kind(tmp_path: Path) -> None:
    """Whatever a version is, they are written in place, or nothing is."""
    w, narrow = torch.zeros(4), torch.zeros(4).bfloat16()
    publisher = Publisher(tmp_path, anchor_every=9)
    publisher.publish({"w": w + 1})
    error = r"'w' is torch.float32 \[4\] there, and torch.bfloat16 \[4\] here"
    for weights in ({"w": narrow}, Narrow(narrow)):
        with pytest.raises(VersionError, match=error):
            Subscriber(tmp_path, weights).update()
    given = {"w": w}
    subscriber = Subscriber(tmp_path, given)
    subscriber.update()
    assert given["w"] is w
    publisher.publish({"w": torch.ones(2, 2)})
    with pytest.raises(VersionError, match=r"'w' is torch.float32 \[2, 2\] there"):
        subscriber.update()
    assert given["w"] is w
    subscriber.verify()
    own = Subscriber(tmp_path)
    own.update(0)
    own.update()
    assert own.tensors["w"].shape == (2, 2)


class Narrow(nn.Module):
    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def test_tensors_that_share_elements_are_refused(tmp_path: Path) -> None:
    """To undo what is written twice would not make them what they were."""
    w = torch.arange(8.0)
    Publisher(tmp_path).publish({"a": w, "b": w.view(2, 4)})
    with pytest.raises(InputError, match="a and b share elements"):
        Subscriber(tmp_path, {"a": w, "b": w.view(2, 4)}).update()


# ---- steps that are made twice, or fail


def test_a_step_is_made_once(tmp_path: Path) -> None:
    """Also if the subscriber has come back to where it was prepared."""
    publisher, models = Publisher(tmp_path, anchor_every=1), history(2)
    publisher.publish(models[0])
    subscriber = Subscriber(tmp_path)
    whole = subscriber.prepare()
    subscriber.update()
    publisher.publish(models[1])
    step = subscriber.prepare()
    assert whole is not None
    assert step is not None
    with pytest.raises(VersionError, match="was prepared for None, but the weights are 0"):
        whole.apply()
    step.apply()
    subscriber.update(0)
    with pytest.raises(VersionError, match="or it is written already; prepare again"):
        step.apply()
    subscriber.verify()
    assert same(subscriber.tensors, models[0])


def long_history() -> list[Model]:
    """Return two versions that differ by several chunks, if these are of 1000 bytes."""
    first = first_model(size=4000)
    return [first, trained(first, 1)]


@given(st.integers(0, 6), st.integers(0, 6), st.sampled_from([1, 3]), st.booleans())
def test_an_interrupt_while_a_delta_is_written(
    folders: Folders, at: int, again: int, threads: int, back: bool
) -> None:
    """All is undone; or if that is interrupted as well, the subscriber begins anew."""
    path, models = folders(), long_history()
    publisher, subscriber = Publisher(path), Subscriber(path)
    with chunks_of(1000):
        publish(publisher, models)
    subscriber.update(0)
    before = subscriber.version
    if back:
        subscriber.update()
        before, models = subscriber.version, models[::-1]
    real, calls = Found.swap, iter(range(99))

    def interrupted(found: Found, parts: Any) -> None:
        if next(calls) in (at, at + 1 + again):
            raise KeyboardInterrupt
        real(found, parts)

    write = subscriber.rollback if back else subscriber.update
    swaps, quiet = patch.object(Found, "swap", interrupted), suppress(KeyboardInterrupt)
    with swaps, using(ISAS[-1], threads), quiet:
        write()
        before, models = subscriber.version, models[::-1]
    if subscriber.version is not None:
        assert subscriber.version == before
        assert same(subscriber.tensors, models[0])
        subscriber.verify()
    subscriber.update(1)
    subscriber.verify()
    assert subscriber.version is not None
    assert subscriber.version.number == 1


def test_an_error_within_a_chunk(tmp_path: Path) -> None:
    """What is written in part claims no version, and a whole model takes its place."""
    models = [{name: torch.full((9, 9), n) for name in "ab"} for n in (0.0, 1.0)]
    publish(Publisher(tmp_path), models)
    subscriber = Subscriber(tmp_path, {name: torch.zeros(9, 9).t() for name in "ab"})
    subscriber.update(0)
    real, fails = Part.put, iter([False, True])

    def put(part: Part, places: torch.Tensor, bits: torch.Tensor) -> None:
        if next(fails, False):
            raise torch.OutOfMemoryError
        real(part, places, bits)

    with patch.object(Part, "put", put), pytest.raises(torch.OutOfMemoryError):
        subscriber.update()
    assert subscriber.version is None
    subscriber.update()
    assert same(subscriber.tensors, models[1])


def test_a_signal_while_a_delta_is_written(tmp_path: Path) -> None:
    """It comes to the thread that waits for those that write, even if torch uses one."""
    models, real = long_history(), Found.swap
    with chunks_of(1000):
        publish(Publisher(tmp_path), models)
    subscriber = Subscriber(tmp_path)
    subscriber.update(0)
    signals = iter([True])

    def signalled(found: Found, parts: Any) -> None:
        real(found, parts)
        if next(signals, False):
            signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)

    swaps = patch.object(Found, "swap", signalled)
    with swaps, using(ISAS[-1], 1), pytest.raises(KeyboardInterrupt):
        subscriber.update()
    assert subscriber.version == version_of(models[0])
    assert same(subscriber.tensors, models[0])


# ---- files


def test_a_file_that_is_not_whole_is_passed_by(tmp_path: Path) -> None:
    """Whatever is wrong within: another one leads there."""
    models = history(3)
    publisher = Publisher(tmp_path, anchor_every=2)
    publisher.publish(models[0])
    subscriber, store = Subscriber(tmp_path), Folder(tmp_path)
    subscriber.update()
    publish(publisher, models[1:])
    for entry in read_index(store).entries:
        if entry.base is not None:
            file = File(store.read(entry.names[0]), entry.names[0])
            twice = [*file.chunks(), file.chunks()[0]]
            store.write(entry.names[0], delta_file(twice, entry.base, entry.version))
    update = subscriber.update()
    assert update is not None
    assert update.base is None
    assert same(subscriber.tensors, models[2])


def test_an_index_that_vanished_is_told(tmp_path: Path) -> None:
    Publisher(tmp_path).publish(first_model())
    subscriber = Subscriber(str(tmp_path))
    subscriber.update()
    (tmp_path / INDEX).unlink()
    with pytest.raises(VersionError, match="its index has vanished"):
        subscriber.update()
    assert Subscriber(tmp_path).update() is None


def test_ties_as_deep_as_no_reader_goes() -> None:
    ties = "[" * 100_000
    metadata = {"kind": "anchor", "ties": ties, "ties_crc": f"{crc32(ties.encode()):08x}"}
    text = json.dumps({"__metadata__": metadata}).encode()
    with pytest.raises(FormatError, match="wrong ties"):
        File(len(text).to_bytes(8, "little") + text, "f").tensors()


def test_safetensors_reads_all_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    store, here = Folder(tmp_path), Tied()
    publisher = Publisher(store, anchor_every=2)
    states = []
    for step in range(4):
        train(here, step)
        publisher.publish(here)
        states.append(copied(here.state_dict()))
    read = set()
    for entry in read_index(store).entries:
        (name,) = entry.names
        file = File(store.read(name), name)
        with safetensors.safe_open(tmp_path / name, framework="pt") as opened:
            metadata = opened.metadata()
            assert metadata == file.metadata
            assert metadata["kind"] == entry.kind
            assert metadata["version_sum"] == f"{entry.version.sum:016x}"
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        read.add(entry.kind)
        if entry.kind == "anchor":
            state = states[entry.version.number]
            state.pop("head.weight")  # it is tied
            assert same(tensors, state)
            assert all(t.data_ptr() % t.itemsize == 0 for t in file.tensors().values())
        else:
            chunks = [bytes(chunk) for chunk in file.chunks()]
            assert [tensors[f"chunk.{i}"].numpy().tobytes() for i in range(len(chunks))] == chunks
            assert entry.base is not None
            old = copied(states[entry.base.number])
            for chunk in chunks:
                assign_(old, list(decode(chunk, states[entry.base.number])))
            old["head.weight"] = old["embedding.weight"]
            assert same(old, states[entry.version.number])
    assert read == {"anchor", "delta"}


# ---- what has changed


@given(models(alike=True), st.sampled_from(CODES))
def test_updates_tell_what_has_changed(
    folders: Folders, pair: tuple[Model, Model], code: str
) -> None:
    """All that differs; and nothing else, but in tensors that are sent whole."""
    old, new = pair
    for name in [name for name, t in old.items() if t.dtype == torch.complex32]:
        del old[name], new[name]
    old["w"] = new["w"] = torch.zeros(2)
    store = Folder(folders())
    publisher, subscriber = Publisher(store, code=code), Subscriber(store)
    mirror = {name: torch.empty_like(tensor) for name, tensor in old.items()}
    publisher.publish(old)
    update = subscriber.update()
    assert update is not None
    assign_(mirror, update.changes())
    assert same(mirror, old)
    publisher.publish(new)
    update = subscriber.update()
    assert update is not None
    told = list(update.changes())
    total = 0
    for name, tensor in new.items():
        differs = (bits_of(tensor) != bits_of(old[name])).reshape(-1).nonzero().reshape(-1)
        mine = [change.indices for change in told if change.name == name]
        places = torch.cat([differs[:0], *mine])
        assert len(places.unique()) == len(places)
        assert set(differs.tolist()) <= set(places.tolist())
        if len(places) < tensor.numel():
            assert torch.equal(places.sort().values, differs)
        total += len(places)
    assert update.changed == total
    assign_(mirror, told)
    assert same(mirror, new)


class Flaky(Folder):
    """A folder that cannot be read for a while, after so many files."""

    left = 1 << 30

    def read(self, name: str) -> memoryview:
        self.left -= 1
        if self.left < 0:
            raise OSError("it is away")
        return super().read(name)


turns = st.sampled_from(["publish", "publish", "appear", "vanish", "tie"])
looks = st.sampled_from(["update", "steps", "fail", "rollback", "goto", "reload"])


@given(st.lists(turns | looks, max_size=20), st.integers(1, 6), st.integers(0, 9))
def test_an_update_tells_of_all_versions_since_the_last(
    folders: Folders, actions: list[str], anchor_every: int, left: int
) -> None:
    """A mirror that is only told of updates is always what the subscriber was when it told.

    Over any number of versions and whole models, also after errors on the way and steps back; the
    bytes are those of all files that were read.
    """
    store = Flaky(folders())
    publisher = Publisher(store, anchor_every=anchor_every, lag=3)
    subscriber, model = Subscriber(store), first_model()
    mirror: Model = {}
    known: Version | None = None

    def follow(update: Update | None) -> None:
        nonlocal known
        if update is None:
            return
        if update.base is None:
            mirror.clear()
        assert update.base in (None, known)
        for change in update.changes():
            if change.values is None:
                del mirror[change.name]
                continue
            if change.new:
                mirror[change.name] = torch.zeros(change.shape, dtype=change.dtype)
            bits = bits_of(mirror[change.name]).view(-1)
            bits[change.indices] = bits_of(change.values)
        known = update.version
        assert same(mirror, subscriber.tensors)
        assert known == subscriber.version
        subscriber.verify()

    publisher.publish(model)
    for number, action in enumerate(actions, 1):
        match action:
            case "publish":
                model = trained(model, number)
            case "appear":
                model = trained(model, number) | {"late": torch.full((3, number % 3), 1.0)}
            case "vanish":
                model.pop("late", None)
            case "tie":
                model["late"] = model["layer.bias"]
            case "update":
                follow(subscriber.update())
            case "steps":
                for update in subscriber.updates():
                    follow(update)
            case "fail":
                store.left = left % 5
                with suppress(OSError):
                    follow(subscriber.update())
                store.left = 1 << 30
            case "rollback":
                with suppress(VersionError):
                    subscriber.rollback()
            case "goto":
                newest = read_index(store).newest
                assert newest is not None
                with suppress(VersionError):
                    follow(subscriber.update(max(newest.number - left, 0)))
            case "reload":
                follow(subscriber.reload())
        if action in ("publish", "appear", "vanish", "tie"):
            publisher.publish(model)
    follow(subscriber.update())
    assert known == read_index(store).newest
    assert same(mirror, model)


def test_an_update_adds_up_bytes_and_is_told_in_time(tmp_path: Path) -> None:
    publisher, models = Publisher(tmp_path), history(6)
    publisher.publish(models[0])
    subscriber = Subscriber(tmp_path)
    first = subscriber.update()
    publish(publisher, models[1:5])
    update = subscriber.update()
    assert first is not None and update is not None
    _, *deltas = read_index(tmp_path).entries
    assert update.base == first.version and update.version.number == 4
    assert update.bytes == sum(entry.bytes for entry in deltas)
    assert update.changed == sum(entry.changed for entry in deltas)
    with pytest.raises(VersionError, match=r"has left version 0 .*take the changes"):
        first.changes()
    list(update.changes())
    begun, unbegun = update.changes(), update.changes()
    next(begun)
    subscriber.rollback()
    for tell in (update.changes, partial(next, begun), partial(next, unbegun)):
        with pytest.raises(VersionError, match="has left version 4 "):
            tell()


def test_changes_of_tensors_that_appear_and_vanish(tmp_path: Path) -> None:
    store, a = Folder(tmp_path), torch.arange(4.0)
    publisher, subscriber = Publisher(store), Subscriber(store)
    publisher.publish({"a": a, "b": a + 1})
    subscriber.update()
    publisher.publish({"a": a, "c": a + 2})
    update = subscriber.update()
    assert update is not None
    told = {change.name: change for change in update.changes()}
    assert told.keys() == {"b", "c"}
    assert told["b"].values is None
    assert told["c"].new and told["c"].values is not None
    assert torch.equal(told["c"].values, a + 2)
    subscriber.rollback()
    assert same(subscriber.tensors, {"a": a, "b": a + 1})


def test_a_foreign_write_is_found(tmp_path: Path) -> None:
    store, models = Folder(tmp_path), history(3)
    publisher, subscriber = Publisher(store), Subscriber(store)
    with pytest.raises(InputError, match="update first"):
        subscriber.verify()
    publish(publisher, models[:2])
    subscriber.update()
    subscriber.verify()
    place = int(
        (bits_of(models[1]["layer.weight"]) != bits_of(models[2]["layer.weight"]))
        .view(-1)
        .nonzero()[0]
    )
    bits_of(subscriber.tensors["layer.weight"]).view(-1)[place] ^= 1
    before = copied(subscriber.tensors)
    with pytest.raises(VersionError, match=r"something else has written to them; reload\(\)"):
        subscriber.verify()
    publisher.publish(models[2])
    with pytest.raises(VersionError, match="does not fit these weights"):
        subscriber.update()
    assert same(subscriber.tensors, before)
    subscriber.reload()
    subscriber.verify()
    assert same(subscriber.tensors, models[2])


# ---- DTensors


def assigned(comm: Communicator) -> list[bool]:
    """Write what changes to tensors that are cut in several ways, and compare what is here."""
    mesh = init_device_mesh("cpu", (comm.size,))
    old = {f"w{i}": torch.arange(i * 60.0, (i + 1) * 60).view(6, 2, 5) for i in range(4)}
    old["odd"] = torch.arange(7.0).bfloat16()
    new = copied(old)
    for tensor in new.values():
        bits_of(tensor).view(-1)[::3] += 1
    cuts = {"w0": Shard(0), "w1": Shard(1), "w2": Shard(2), "w3": Replicate(), "odd": Shard(0)}
    target = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [cuts[name]])
        for name, tensor in old.items()
    }
    same_here = []
    for model in (old, new):
        changes = [
            Change(name, t.dtype, tuple(t.shape), torch.arange(t.numel()), t.view(-1), new=True)
            for name, t in model.items()
        ]
        if model is new:
            changes = [
                Change(c.name, c.dtype, c.shape, c.indices[::3], c.values[::3])
                for c in changes
                if c.values is not None
            ]
        assign_(target, changes)
        wanted = {name: distribute_tensor(t, mesh, [cuts[name]]) for name, t in model.items()}
        same_here.append(
            all(torch.equal(target[n].to_local(), wanted[n].to_local()) for n in target)
        )
    return same_here


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_changes_are_assigned_to_dtensors_cut_differently(run_on: Any, world_size: int) -> None:
    assert run_on(world_size, assigned) == [[True, True]] * world_size


def refused(comm: Communicator, folder: Path) -> str:
    mesh = init_device_mesh("cpu", (comm.size,))
    weights: dict[str, torch.Tensor] = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    assert isinstance(weights["w"], DTensor)
    with pytest.raises(InputError) as error:
        Subscriber(Folder(folder), weights)
    return str(error.value)


@pytest.mark.processes
def test_a_subscriber_refuses_dtensors(run_on: Any, tmp_path: Path) -> None:
    for error in run_on(2, refused, tmp_path):
        assert error.startswith("w is cut over several processes; keep whole tensors")
