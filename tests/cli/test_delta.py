"""`sparcel delta`: what diff writes, apply makes; verify finds what is wrong; watch follows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from sparcel import simulate
from sparcel.core.comm.simulated import SimulatedCommunicator
from sparcel.errors import FormatError, InputError, SparcelError, VersionError
from sparcel.products.delta import (
    Entry,
    Folder,
    Follower,
    Index,
    Mirror,
    Publisher,
    ShardedPublisher,
    Store,
    Subscriber,
    Version,
    encode,
    read_index,
    store_at,
    version_of,
)
from sparcel.products.delta.chunk import read_chunk
from sparcel.products.delta.files import File, anchor_file, delta_file
from sparcel.products.delta.index import write_index
from sparcel.tools.cli import app
from sparcel.tools.cli.delta.places import share

Tensors = dict[str, Tensor]

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.int64)
CODES = ("exponents", "steps", "values")


def outcome(*arguments: object) -> tuple[int, str]:
    """Run a command in this process; return its exit status and what it prints."""
    result = CliRunner().invoke(app, ["delta", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def sparcel(*arguments: object) -> str:
    code, output = outcome(*arguments)
    assert code == 0, output
    return output


def bits(tensors: Tensors) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (t.dtype, tuple(t.shape), t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def model(seed: int = 0, size: int = 64) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(size, size, generator=random).bfloat16(),
        "norm": torch.randn(size, generator=random),
        "steps": torch.arange(3),
    }


def moved(tensors: Tensors, seed: int, share: float = 0.05) -> Tensors:
    """Return tensors of which a share of the elements is one unit in the last place larger."""
    random = torch.Generator().manual_seed(seed)
    after = {}
    for name, tensor in tensors.items():
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        seen = tensor.view(integers[tensor.element_size()])
        chosen = torch.rand(tensor.shape, generator=random) < share
        after[name] = (seen + chosen.to(seen.dtype)).view(tensor.dtype)
    return after


def differing(before: Tensors, after: Tensors) -> int:
    """Count elements that differ in their bits; those of new tensors do as a whole."""
    count = 0
    for name, tensor in after.items():
        old = before.get(name)
        if old is None or (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
            count += tensor.numel()
        else:
            wide = tensor.element_size()
            one, other = (t.reshape(-1).view(torch.uint8).view(-1, wide) for t in (old, tensor))
            count += int((one != other).any(1).sum())
    return count


def number(output: str, what: str) -> int:
    found = re.search(rf"^{what} +([\d,]+)", output, re.MULTILINE)
    assert found is not None, output
    return int(found[1].replace(",", ""))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    """Draw weights of two versions: tensors change, appear, vanish and change their shape."""
    sides: tuple[Tensors, Tensors] = ({}, {})
    for i in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 40), max_size=2))
        whole = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        tensor = whole.view(dtype).reshape(shape)
        fate = draw(st.sampled_from(["moves", "stays", "moves", "appears", "vanishes", "flat"]))
        share = draw(st.sampled_from([0.01, 0.3, 1.0]))
        name = f"layer.{i}"
        if fate != "appears":
            sides[0][name] = tensor
        if fate != "vanishes":
            after = moved({name: tensor}, i, share)[name] if fate == "moves" else tensor
            sides[1][name] = after.reshape(-1).clone() if fate == "flat" else after.clone()
    return sides


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs(), st.sampled_from(CODES))
def test_apply_makes_of_the_old_checkpoint_the_new_one(
    versions: tuple[Tensors, Tensors], code: str
) -> None:
    with TemporaryDirectory() as folder:
        old, new, delta, made = (Path(folder) / name for name in ("old", "new", "delta", "made"))
        save_file(versions[0], old)
        save_file(versions[1], new)
        before = old.read_bytes()
        told = sparcel("diff", old, new, "--output", delta, "--code", code)
        sparcel("apply", old, delta, "--output", made)
        assert bits(load_file(made)) == bits(versions[1])
        assert old.read_bytes() == before
        assert number(told, "elements") == sum(t.numel() for t in versions[1].values())
        assert number(told, "changed") == differing(*versions)
        assert f"{delta.stat().st_size:,} bytes" in told
        assert number(sparcel("diff", made, new), "changed") == 0
        assert sparcel("verify", delta, made, old).count("nothing is wrong") == 3


def save_in_pieces(tensors: Tensors, folder: Path, index: bool) -> Path:
    folder.mkdir()
    where = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        where[name] = f"model-{i:05}-of-{len(tensors):05}.safetensors"
        save_file({name: tensor}, folder / where[name])
    if index:
        save_file(tensors, folder / "consolidated.safetensors")  # which the index does not name
        told = json.dumps({"metadata": {}, "weight_map": where})
        (folder / "model.safetensors.index.json").write_text(told)
    return folder


@pytest.mark.parametrize("index", [False, True])
def test_a_folder_is_the_checkpoint_that_its_files_are(index: bool, tmp_path: Path) -> None:
    before, after = model(), moved(model(), 1)
    save_file(before, tmp_path / "old")
    save_file(after, tmp_path / "new")
    old = save_in_pieces(before, tmp_path / "olds", index)
    new = save_in_pieces(after, tmp_path / "news", index)
    delta = tmp_path / "delta"
    told = sparcel("diff", tmp_path / "old", tmp_path / "new")
    pieced = sparcel("diff", old, new, "--output", delta)
    for what in ("elements", "changed"):
        assert number(pieced, what) == number(told, what)
    for base in (old, tmp_path / "old"):
        sparcel("apply", base, delta, "--output", tmp_path / "made")
        assert bits(load_file(tmp_path / "made")) == bits(after)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A folder with the checkpoints a, b and c, and the deltas ab and bc."""
    versions = [model(), moved(model(), 1), moved(moved(model(), 1), 2)]
    for name, tensors in zip("abc", versions, strict=True):
        save_file(tensors, tmp_path / name)
    for one, other in pairwise("abc"):
        sparcel("diff", tmp_path / one, tmp_path / other, "--output", tmp_path / f"{one}{other}")
    return tmp_path


def test_deltas_are_applied_one_after_the_other(three: Path) -> None:
    told = sparcel("apply", three / "a", three / "ab", three / "bc", "--output", three / "made")
    assert bits(load_file(three / "made")) == bits(load_file(three / "c"))
    assert told.startswith(f"{three / 'made'} is version 1 ")


def test_what_apply_makes_states_its_version(three: Path) -> None:
    sparcel("apply", three / "a", three / "ab", "--output", three / "made")
    again = sparcel("diff", three / "made", three / "c", "--output", three / "2")
    assert "makes version 2 " in again
    sparcel("apply", three / "b", three / "2", "--output", three / "last")
    assert bits(load_file(three / "last")) == bits(load_file(three / "c"))


def test_ties_of_whole_models_are_kept(tmp_path: Path) -> None:
    """Between models that tie other tensors, or none, too."""
    kinds: dict[str, Tensors] = {}
    for name, alias in (("one", "head"), ("other", "steps"), ("apart", "none")):
        tensors = moved(model(), len(kinds))
        kinds[name] = tensors | {"head": tensors["norm"].clone()}
        kinds[name][alias] = kinds[name]["embedding"]
        Folder(tmp_path).write(name, anchor_file(kinds[name], version_of(kinds[name], 3)))
    for old, new in product(kinds, kinds):
        sparcel("diff", tmp_path / old, tmp_path / new, "--output", tmp_path / "delta")
        sparcel("apply", tmp_path / old, tmp_path / "delta", "--output", tmp_path / "made")
        made = File(Folder(tmp_path).read("made"), "made").tensors()
        assert bits(made) == bits(kinds[new])
        ties = [{t.data_ptr(): name for name, t in ts.items()} for ts in (made, kinds[new])]
        assert len(ties[0]) == len(ties[1])


def test_deltas_that_several_processes_have_published_are_applied_as_one(tmp_path: Path) -> None:
    folder, served = tmp_path / "store", tmp_path / "served"
    served.mkdir()

    def train(comm: SimulatedCommunicator) -> None:
        publisher = ShardedPublisher(Folder(folder), comm, anchor_every=2)
        for i in range(4):
            publisher.publish(moved(model(), i))

    simulate(2, train)
    assert "nothing is wrong" in sparcel("verify", folder)
    *_, last = read_index(Folder(folder)).entries
    assert last.base is not None and len(last.names) == 2
    old, made = tmp_path / "old", tmp_path / "made"
    before = Subscriber(Folder(folder))
    before.update(last.base.number)
    old.write_bytes(b"".join(anchor_file(before.tensors, last.base)))
    sparcel("apply", old, *(folder / name for name in last.names), "--output", made)
    assert bits(load_file(made)) == bits(moved(model(), 3))
    with pytest.raises(VersionError):
        sparcel("apply", old, folder / last.names[0], "--output", tmp_path / "half")


def test_deltas_of_a_store_fit_the_checkpoint_of_a_wrapped_model(tmp_path: Path) -> None:
    """What comes out has the names that were there, as after a diff of two of them."""
    plain = model(), moved(model(), 1)
    before, after = ({f"_orig_mod.{name}": one for name, one in m.items()} for m in plain)
    old, made, publisher = tmp_path / "old", tmp_path / "made", Publisher(tmp_path / "store")
    for weights in (before, after):
        publisher.publish(weights)
    save_file(before, old)
    (delta,) = (tmp_path / "store").glob("delta*")
    sparcel("apply", old, delta, "--output", made)
    assert bits(load_file(made)) == bits(after)
    save_file(plain[1], tmp_path / "new")
    sparcel("diff", old, tmp_path / "new", "--output", tmp_path / "own")
    sparcel("apply", old, tmp_path / "own", "--output", made)
    assert bits(load_file(made)) == bits(after)


def test_names_and_urls_are_shown_without_what_means_harm(tmp_path: Path) -> None:
    name = "\x1b[2J\nstore: nothing is wrong"
    old, new = {name: torch.zeros(9)}, {name: torch.ones(9)}
    publisher = Publisher(tmp_path / "store")
    for weights in (old, new):
        publisher.publish(weights)
    foreign = {name: torch.full((9,), 2.0)}
    (path,) = (tmp_path / "store").glob("delta*")
    file = File(path.read_bytes(), path.name)
    chunks = list(encode(new, foreign, since=file.version("base"), target=1))
    version = file.version("base").after(1, sum(read_chunk(chunk).sum for chunk in chunks))
    path.write_bytes(b"".join(map(bytes, delta_file(chunks, file.version("base"), version))))
    index = read_index(tmp_path / "store")
    anchor, entry = index.entries
    entry = replace(entry, version=version, bytes=path.stat().st_size)
    write_index(Folder(tmp_path / "store"), replace(index, entries=(anchor, entry)))
    code, output = outcome("verify", tmp_path / "store")
    assert code == 1 and r"\x1b[2J\nstore: nothing is wrong" in output
    assert "\x1b" not in output and output.count("\n") == 2
    code, output = outcome("verify", "nosuch://user:SECRET@host/run?SECRET")
    assert code == 1 and "nosuch://host/run" in output and "SECRET" not in output


def test_what_does_not_fit_writes_nothing(three: Path) -> None:
    kept = b"what was there"
    (three / "made").write_bytes(kept)
    delta = bytearray((three / "ab").read_bytes())
    delta[-60] ^= 1
    (three / "corrupt").write_bytes(delta)
    (three / "torn").write_bytes(delta[:-7])
    (three / "empty").touch()
    files = sorted(three.iterdir())
    for old, deltas, error in (
        ("a", ["bc"], VersionError),
        ("a", ["bc", "ab"], VersionError),
        ("a", ["ab", "ab"], VersionError),
        ("b", ["ab"], VersionError),
        ("a", ["corrupt"], FormatError),
        ("a", ["torn"], FormatError),
        ("a", ["empty"], FormatError),
        ("a", ["b"], InputError),
        ("ab", ["ab"], InputError),
        ("a", ["nowhere"], InputError),
    ):
        paths = [three / name for name in deltas]
        with pytest.raises(error):
            sparcel("apply", three / old, *paths, "--output", three / "made")
        assert (three / "made").read_bytes() == kept
        assert sorted(three.iterdir()) == files


def test_outputs_that_take_the_place_of_an_input_are_refused(three: Path) -> None:
    for command in (
        ["diff", "a", "b", "--output", "a"],
        ["diff", "a", "b", "--output", "b"],
        ["apply", "a", "ab", "--output", "a"],
        ["apply", "a", "ab", "--output", "ab"],
        ["apply", "a", "ab", "--output", os.devnull],
    ):
        with pytest.raises(InputError):
            sparcel(*(three / word if (three / word).exists() else word for word in command))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["diff", "a", "nowhere"], "there is no such file"),
        (["diff", "a", "ab"], "is a delta; give a checkpoint"),
        (["diff", "a", "b", "--code", "step"], "did you mean 'steps'?"),
        (["diff", "a", "bare"], "holds no *.safetensors"),
        (["diff", "a", "twice"], "in several files"),
        (["diff", "a", "lost"], "there is no such file"),
        (["diff", "a", "wrong"], "is no index"),
        (["log", "bare"], "nothing was published"),
        (["log", "nowhere"], "there is no folder nowhere"),
        (["log", "locked"], "is a folder, where a file should be"),
        (["log", "a"], "a is a file; a store is a folder or a URL"),
        (["watch", "a"], "a is a file; a store is a folder or a URL"),
        (["watch", "bare", "--every", "0s"], "more than 0s"),
        (["watch", "bare", "--output", "a"], "can't write a: File exists"),
        (["diff", "a", "b", "--output", "/proc/x.delta"], "can't write /proc/x.delta: "),
        (["apply", "a", "ab", "--output", "/proc/x"], "can't write /proc/x: "),
    ],
)
def test_what_cannot_be_used_is_told(
    arguments: list[str], told: str, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(three)
    Path("bare").mkdir()
    Path("twice").mkdir()
    save_file(model(), "twice/one.safetensors")
    save_file(model(), "twice/two.safetensors")
    Path("locked/index.json").mkdir(parents=True)
    for name, content in (("lost", {"weight_map": {"a": "a.safetensors"}}), ("wrong", [])):
        Path(name).mkdir()
        Path(name, "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises((SparcelError, OSError), match="^.*" + re.escape(told)) as caught:
        sparcel(*arguments)
    assert "Errno" not in str(caught.value)


def test_diff_says_why_a_delta_between_other_models_is_long(three: Path) -> None:
    save_file({name: t.float() for name, t in model().items()}, three / "wide")
    save_file({"other": torch.ones(3)}, three / "small")
    save_file({"norm": torch.ones(3)}, three / "shape")
    assert len(sparcel("diff", three / "a", three / "b").splitlines()) == 9
    told = sparcel("diff", three / "a", three / "wide")
    assert "from bfloat16 to float32, sent whole: 1." in told
    assert "from int64 to float32, sent whole: 1." in told
    told = sparcel("diff", three / "a", three / "small")
    assert "no tensor in common" in told
    assert re.search(r"of the checkpoint +[\d,]{5,} % ", told)
    assert "shape changes, sent whole: 1." in sparcel("diff", three / "a", three / "shape")


def test_shares_have_no_exponents() -> None:
    told = [share(part, 10**9) for part in (0, 1, 10**6, 12_345_678, 4 * 10**11, 10**9 - 1)]
    assert told == ["0 %", "< 0.0001 %", "0.1 %", "1.23 %", "40,000 %", "100 %"]


def publish(store: Folder | str, versions: int, anchor_every: int = 3) -> Tensors:
    """Publish versions with numbers from 10 on, and return the last one."""
    place = store_at(store) if isinstance(store, str) else store
    publisher = Publisher(place, anchor_every=anchor_every)
    tensors = model()
    for i in range(versions):
        tensors = moved(tensors, i) if i else tensors
        publisher.publish(tensors, number=10 + i)
    return tensors


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store")
    pytest.importorskip("fsspec")
    return f"memory://{tmp_path.name}"


def test_log_lists_every_file_of_a_store(store: str) -> None:
    publish(store, 6)
    lines = sparcel("log", store).splitlines()
    rows = [line.split() for line in lines if re.match(r" +1\d ", line)]
    entries = read_index(store_at(store)).entries
    assert len(rows) == len(entries) > 6
    for row, entry in zip(rows, entries, strict=True):
        assert row[0] == str(entry.version.number)
        assert row[1:3] == ([str(entry.base.number), "delta"] if entry.base else ["whole", "model"])
        assert entry.base is None or f"{100 * entry.changed / entry.elements:.3g}" in row
    assert f"The newest version is {entries[-1].version}." in lines[-1]


def test_verify_finds_nothing_in_a_sound_store(store: str) -> None:
    publish(store, 6)
    assert re.search(
        r"6 versions .* the newest is 15 .*; nothing is wrong", sparcel("verify", store)
    )


def test_verify_goes_on_past_what_it_cannot_read(three: Path) -> None:
    (three / "bare").mkdir()
    code, output = outcome("verify", three / "nowhere", three / "bare", "foo://x", three / "a")
    assert code == 1
    for told in ("nowhere: there is no such file or folder", "bare: nothing was published", "foo:"):
        assert told in output
    last = output.splitlines()[-1]
    assert last.startswith(f"{three / 'a'}: ") and last.endswith("nothing is wrong")


def flip(path: Path, place: float) -> None:
    """Change a bit of a file's tensors."""
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    data[begin + int(place * (len(data) - begin))] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["first bit", "middle bit", "last bit", "torn", "lost", "empty"])
def test_verify_names_any_file_that_is_damaged(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    publish(Folder(folder), 5)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 5
    for path in files:
        whole = path.read_bytes()
        if damage == "lost":
            path.unlink()
        elif damage in ("torn", "empty"):
            path.write_bytes(whole[:-3] if damage == "torn" else b"")
        else:
            flip(path, {"first bit": 0.0, "middle bit": 0.5, "last bit": 0.999}[damage])
        code, output = outcome("verify", folder)
        assert code == 1
        assert f"{folder}: {path.name}" in output
        path.write_bytes(whole)
    assert outcome("verify", folder)[0] == 0


def test_verify_finds_sound_files_that_lead_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    publish(Folder(folder), 3, anchor_every=50)
    index = json.loads((folder / "index.json").read_text())
    for entry in index["entries"][1:]:
        entry["base"], entry["version"] = [
            [number, f"{int(total, 16) ^ 1:016x}"]
            for number, total in (entry["base"], entry["version"])
        ]
    (folder / "index.json").write_text(json.dumps(index))
    code, output = outcome("verify", folder)
    assert code == 1
    assert output.count("and the index lists") == 2
    for entry in index["entries"][1:]:
        entry["version"][1] = f"{int(entry['version'][1], 16) ^ 1:016x}"
    (folder / "index.json").write_text(json.dumps(index))
    assert outcome("verify", folder)[1].count("and the index lists") == 2, "the bases are others"
    (folder / "index.json").write_text("{}")
    code, output = outcome("verify", folder)
    assert code == 1
    assert "the index" in output


def test_verify_applies_each_delta_to_the_version_that_it_is_for(tmp_path: Path) -> None:
    """Without whole models that are sound, it says of each delta that it could not."""
    folder = tmp_path / "store"
    publish(Folder(folder), 5)
    first, second = sorted(folder.glob("anchor-*"))
    kept = second.read_bytes()
    flip(second, 0.3)
    assert outcome("verify", folder)[1].count("nothing sound leads") == 0
    flip(first, 0.3)
    assert outcome("verify", folder)[1].count("nothing sound leads") == 5
    second.write_bytes(kept)
    assert outcome("verify", folder)[1].count("nothing sound leads") == 4


def test_verify_finds_no_fault_in_what_subscribers_use(tmp_path: Path) -> None:
    """They pass by a torn chain, by the delta from one whole model to the next."""
    folder = tmp_path / "store"
    publish(Folder(folder), 6)
    for name in ("delta-0000000011-0000000012-*", "anchor-0000000013-*"):
        flip(next(folder.glob(name)), 0.3)
    went = [update.version.number for update in Subscriber(Folder(folder)).updates()]
    assert went == [10, 13, 14, 15]
    code, output = outcome("verify", folder)
    assert code == 1
    (blamed,) = re.findall(r"(delta-\S+): nothing sound leads", output)
    assert blamed.startswith("delta-0000000012-0000000013-")
    assert output.endswith("; 3 faults\n")


def test_verify_finds_a_delta_that_is_of_other_weights(tmp_path: Path) -> None:
    """Its checksums match, and it is found by applying it."""
    store = Folder(tmp_path / "store")
    publish(store, 1)
    (anchor,) = read_index(store).entries
    other = model(seed=1)
    chunks = list(encode(moved(other, 1), other, since=anchor.version, target=11))
    total = anchor.version.sum + sum(read_chunk(chunk).sum for chunk in chunks)
    version, name = Version(11, total % (1 << 64)), "delta-of-others.safetensors"
    length = store.write(name, delta_file(chunks, anchor.version, version))
    entry = Entry("delta", anchor.version, version, (name,), length, 1, 1, 0.0)
    write_index(store, read_index(store).with_entries(entry))
    assert outcome("verify", store.path / name)[0] == 0
    code, output = outcome("verify", store)
    assert code == 1
    assert f"{name}: " in output and "does not fit these weights" in output


def watched(
    job: Callable[[], None], monkeypatch: pytest.MonkeyPatch, store: Path, *options: object
) -> list[str]:
    """Watch a store; do a job after a first look at it, then look again and press Ctrl-C."""
    looks = threading.Semaphore(0)

    def look(store: Store) -> Index:
        looks.release()
        return read_index(store)

    def run() -> None:
        for _ in range(2):  # the second look begins when the first one has ended
            looks.acquire(timeout=20)
        try:
            job()
        finally:
            while looks.acquire(blocking=False):
                pass
            for _ in range(2):
                looks.acquire(timeout=20)
            if signal.getsignal(signal.SIGINT) != before:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("sparcel.products.delta.read_index", look)
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    output = sparcel("watch", store, "--every", "20ms", *options)
    thread.join()
    assert signal.getsignal(signal.SIGINT) == before
    return output.splitlines()


def versions_shown(output: str) -> list[int]:
    return [int(found) for found in re.findall(r"version (\d+) \(", output)]


@pytest.mark.parametrize("keep", ["", "--output", "--mirror"])
def test_watch_shows_each_version_once_until_it_is_interrupted(
    keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, served = tmp_path / "store", tmp_path / "new" / "served"
    folder.mkdir()
    last: Tensors = {}

    def train() -> None:
        last.update(publish(Folder(folder), 5))

    first, *lines = watched(train, monkeypatch, folder, *([keep, served] if keep else []))
    assert first == f"{folder} has no versions yet; waiting for the first"
    shown = versions_shown("\n".join(lines))
    assert len(shown) == len(lines)
    assert shown == sorted(set(shown)) and shown[-1] == 14
    assert served.exists() == bool(keep)
    if keep == "--mirror":
        mirror = Mirror(served)
        mirror.update()
        assert bits(dict(mirror.tensors)) == bits(last)
        Follower(folder, served).close()
    elif keep:
        assert [path.name for path in served.iterdir()] == ["model.safetensors"]
        assert bits(load_file(served / "model.safetensors")) == bits(last)


def test_watch_waits_for_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    first, *_, last = watched(lambda: folder.mkdir(), monkeypatch, folder)
    assert first == f"there is no folder {folder} yet; waiting for it"
    assert last == f"{folder} has no versions yet; waiting for the first"


def test_watch_goes_on_while_a_store_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    publish(Folder(folder), 1)
    index = (folder / "index.json").read_bytes()
    (folder / "index.json").write_bytes(index[:40])

    def repair() -> None:
        (folder / "new").write_bytes(index)
        (folder / "new").replace(folder / "index.json")

    first, second = watched(repair, monkeypatch, folder)
    assert first.endswith("; trying again")
    assert versions_shown(second) == [10]


def test_watch_makes_its_folder_again_and_shows_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, served = tmp_path / "store", tmp_path / "served"
    publish(Folder(folder), 3)
    tied = torch.arange(6.0)

    def another_run() -> None:
        shutil.rmtree(served)
        other = tmp_path / "other"
        Publisher(other).publish({"head": tied, "tied": tied}, number=2)
        folder.rename(tmp_path / "before")
        other.rename(folder)

    lines = watched(another_run, monkeypatch, folder, "--output", served)
    assert [n for line in lines for n in versions_shown(line)] == [12, 2]
    assert bits(load_file(served / "model.safetensors")) == bits({"head": tied, "tied": tied})
