"""The copy on disk survives runs, kills, torn files and full disks, and nothing foreign is lost."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Barrier, Thread
from urllib.error import URLError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from sparcel.errors import SparcelWarning
from sparcel.products.data import Cached, disk
from sparcel.products.data.records import Source, range_of
from tests.data.sources import (
    Files,
    Given,
    all_right,
    decode,
    killed_after,
    processes,
    read_on,
)

NAME = "sparcel-samples.records"


def filled(folder, length=40, **settings):
    cached = opened(folder, length, **settings)
    assert all_right(cached, settings.get("salt", 0))
    return cached


def opened(folder, length=40, salt=0, **settings):
    return Cached(Files(length, salt), folder, memory=0, decode=decode, **settings)


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_second_run_reads_nothing_from_the_source(tmp_path):
    with silence():
        filled(tmp_path / "a" / "b")
        again = filled(tmp_path / "a" / "b", looks=0)
    stats = again.stats()
    assert (stats.from_disk, stats.from_source) == (40, 0)
    assert 40 * 100 < stats.disk_bytes < 1_000_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"salt": 1}, r"sample \d+ of the source is not the one of .*; it is made anew"),
        ({"version": "2"}, r'has samples of .*"version": "".*, not of .*"2".*; it is made anew'),
        ({"length": 41}, r"has samples of .* 40, .* not of .* 41, .*; it is made anew"),
    ],
)
def test_samples_of_something_else_are_read_anew(tmp_path, settings, message):
    filled(tmp_path)
    (tmp_path / NAME).chmod(0o600)
    with pytest.warns(SparcelWarning, match=message):
        changed = filled(tmp_path, **settings)
    assert changed.stats().from_disk == 0
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    del changed
    with silence():
        assert filled(tmp_path, looks=0, **settings).stats().from_source == 0


class Mapped(Dataset):
    """A dataset around another one, as people write it to transform a fold."""

    def __init__(self, inside):
        self.inside = inside

    def __len__(self):
        return len(self.inside)

    def __getitem__(self, place):
        return self.inside[place]


AROUND = {
    "itself": lambda subset: subset,
    "a subset": lambda subset: Subset(subset, range(20)),
    "a dataset": lambda subset: Mapped(subset),
    "several": lambda subset: ConcatDataset([subset, Files(40)]),
    "by name": lambda subset: StackDataset(one=subset, other=subset),
}


@pytest.mark.parametrize("around", AROUND)
def test_folds_of_one_dataset_are_told_apart_by_their_indices(around):
    def identity(fold):
        return Source(AROUND[around](Subset(Files(40), fold)), 1).identity("")

    fold = [*range(19), 20]
    assert identity(range(20)) != identity(fold)
    for same in (fold, tuple(fold), np.array(fold), torch.tensor(fold), [*np.array(fold)]):
        assert identity(same) == identity(fold)


def test_a_set_of_indices_is_the_same_in_any_order():
    order, other = {0, 8}, {8, 0}
    assert [*order] != [*other]  # as texts are in two processes
    sources = [Source(Subset(Files(40), indices), 1) for indices in (order, other)]
    assert sources[0].identity("") == sources[1].identity("")


def test_each_part_of_a_dataset_is_looked_at_once():
    """Twice as many ways to the parts at each level, a cycle, and a part without a length."""

    class Closed(Dataset):
        def __len__(self):
            raise RuntimeError("the file is not open")

    around = Mapped(Files(40))
    around.inside.closed, around.inside.cycle = Closed(), around
    for _ in range(30):
        around = Mapped(around)
        around.other = around.inside
    with silence():
        Cached(around, None, memory=0)


def test_a_source_that_is_random_is_told(tmp_path):
    class Counting(Given):
        def __getitem__(self, place):
            self.samples[place] += 1
            return self.samples[place]

    first = Cached(Counting([0] * 5), tmp_path, memory=0)
    assert [first[i] for i in range(5)] == [1] * 5
    del first
    with pytest.warns(SparcelWarning, match=r"dataset\[\d\] is another sample at each access"):
        again = Cached(Counting([5] * 5), tmp_path, memory=0)
    assert [again[i] for i in range(5)] == [1] * 5


def test_a_disk_that_fails_for_a_moment_loses_nothing(tmp_path, monkeypatch):
    filled(tmp_path)

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "the disk failed")

    with monkeypatch.context() as broken:
        broken.setattr("sparcel.products.data.disk._File.__init__", failing)
        with pytest.warns(SparcelWarning, match="not kept on disk: .*the disk failed"):
            assert filled(tmp_path).stats().from_source == 40
    with silence():
        assert filled(tmp_path).stats().from_disk == 40


@pytest.mark.parametrize("error", [URLError("503"), KeyError(3)])
def test_an_error_of_the_source_is_not_one_of_the_disk(tmp_path, error):
    class Failing(Files):
        def __getitem__(self, place):
            raise error

    Failing.__qualname__ = Files.__qualname__  # so that the copy on disk is of this source
    filled(tmp_path)
    with silence(), pytest.raises(type(error)) as raised:
        Cached(Failing(40), tmp_path, memory=0, decode=decode)
    assert raised.value is error
    with silence():
        assert filled(tmp_path).stats().from_disk == 40


@pytest.mark.parametrize("after", ["reserve", "write", "enter"])
def test_an_interrupt_while_samples_are_written_leaves_records_whole_or_absent(
    tmp_path, monkeypatch, after
):
    cached = opened(tmp_path)
    whole = getattr(disk._File, after)

    def interrupted(*arguments: object) -> None:
        whole(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(disk._File, after, interrupted)
        with pytest.raises(KeyboardInterrupt):
            cached[0]
    with silence():
        assert all_right(cached)
        assert all_right(opened(tmp_path))
    assert cached.stats().from_source == 40 - (after == "enter")


@pytest.mark.parametrize("noise", [b"text", b"\0" * 8, b"\xff" * 300])
@pytest.mark.parametrize("place", [0, 3])
def test_a_record_that_became_something_else_is_read_anew(tmp_path, noise, place):
    cached = filled(tmp_path)
    offset, _ = range_of(cached._disk._file.entry(place))
    del cached
    with (tmp_path / NAME).open("r+b") as file:
        file.seek(offset)
        file.write(noise)
    with pytest.warns(SparcelWarning, match=rf"sample {place} was torn on disk"):
        assert filled(tmp_path, looks=0).stats().from_source in (1, 2, 3)  # of few bytes each
    with silence():
        assert filled(tmp_path).stats().from_source == 0


def test_a_file_that_is_cut_off_while_it_is_used_ends_nothing(tmp_path):
    cached = filled(tmp_path)
    os.truncate(tmp_path / NAME, 100)
    assert all_right(cached)
    with silence():
        assert all_right(cached)
    assert cached.stats().from_source == 80


@settings(max_examples=15)
@given(st.data())
def test_a_torn_file_is_noticed_and_nothing_wrong_is_returned(tmp_path_factory, data):
    """Cut or overwritten anywhere, the file gives right samples or none, now and later."""
    folder = tmp_path_factory.mktemp("cache")
    filled(folder, 20)
    file = folder / NAME
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        file.write_bytes(content[:at])
    else:
        length = data.draw(st.integers(1, 3000))
        noise = random.Random(data.draw(st.integers(0, 1 << 32)))
        content[at : at + length] = noise.randbytes(len(content[at : at + length]))
        file.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparcelWarning)
        for _ in range(3):
            filled(folder, 20)
    with silence():
        assert filled(folder, 20).stats().from_source == 0


@pytest.mark.parametrize("foreign", [b"my thesis, chapter 1 " * 20, b"thesis"])
def test_foreign_files_are_moved_aside(tmp_path, foreign):
    (tmp_path / NAME).write_bytes(foreign)
    content = (tmp_path / NAME).read_bytes()
    with pytest.warns(SparcelWarning, match=r"was not written by sparcel; it is now .*\.foreign"):
        filled(tmp_path)
    (kept,) = tmp_path.glob("*.foreign")
    assert kept.read_bytes() == content
    with silence():
        assert filled(tmp_path, looks=0).stats().from_source == 0


def test_runs_share_a_folder_if_they_need_the_same_of_it(tmp_path):
    with silence():
        one, other = opened(tmp_path), opened(tmp_path)
        assert all_right(one)
        assert all_right(other)
    assert (other.stats().from_disk, other.stats().from_source) == (40, 0)
    with pytest.warns(
        SparcelWarning, match=r"not kept on disk: .* another run uses it, or an earlier"
    ):
        foreign = filled(tmp_path, version="2")
    assert all_right(one)
    assert one.stats().from_disk == 40
    assert foreign.stats().disk_bytes == 0


def test_a_change_that_another_run_uses_is_made_anew_after_it(tmp_path):
    one = filled(tmp_path)
    with pytest.warns(SparcelWarning, match=r"sample \d+ of the source .* another run uses it"):
        filled(tmp_path, salt=1)
    assert all_right(one)
    del one
    with pytest.warns(SparcelWarning, match=r"sample \d+ of the source changed; it is made anew"):
        filled(tmp_path)


def fill(folder, start):
    cached = opened(folder, 60)
    for place in range(start, start + 60):
        cached[place % 60]


def test_processes_fill_it_together(tmp_path):
    filling = [processes.Process(target=fill, args=(tmp_path, at)) for at in (0, 0, 30)]
    for process in filling:
        process.start()
    for process in filling:
        process.join()
        assert process.exitcode == 0
    assert filled(tmp_path, 60).stats().from_source == 0


@pytest.mark.slow
@pytest.mark.processes
def test_killed_processes_leave_no_broken_cache(tmp_path):
    """Two runs at once, each with a forked reader, all of which are killed."""
    length = 20_000
    for seconds in (0.8, 1.1):
        killed_after(seconds, read_on, tmp_path, 0, length)
        with silence():
            cached = opened(tmp_path, length, looks=50)
            for start in range(0, length, 1000):
                places = range(start, start + 1000, 7)
                assert [place for _, place in cached.__getitems__(places)] == [*places]
            assert cached.stats().from_disk > 0
            del cached


def test_a_cache_that_is_gone_has_no_files_open(tmp_path):
    def still_open() -> int:
        names = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum(str(tmp_path) in os.path.realpath(name) for name in names)

    cached = filled(tmp_path)
    assert still_open() == 2
    del cached
    assert still_open() == 0


@pytest.mark.parametrize("name", ["file/folder", "a" * 300])
def test_a_folder_that_cannot_be_made_is_told(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.warns(SparcelWarning, match=r"not kept on disk: .*(Not a directory|too long)"):
        filled(tmp_path / name)


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    cached = filled(tmp_path / "a")
    monkeypatch.setattr("sparcel.products.data.disk.fcntl.flock", refused)
    with pytest.warns(SparcelWarning, match="samples are not kept on disk: .*No locks available"):
        assert filled(tmp_path / "b").stats().from_source == 40
    worker = pickle.loads(pickle.dumps(cached))
    with pytest.warns(SparcelWarning, match="No locks available; samples are read from the source"):
        assert all_right(worker)


@pytest.mark.filterwarnings("ignore:.*keeps no samples in memory")
@pytest.mark.parametrize("name", [NAME, "sparcel-samples.lock"])
def test_nothing_leads_out_of_a_folder(tmp_path, name):
    """The lock and the records are looked at when they are made, and when a worker opens them."""
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.symlink_to(tmp_path / "there")  # which it may be itself
    filled(folder)
    worker, copy = pickle.dumps(opened(folder)), (folder / NAME).read_bytes()
    for plant in (lambda path: path.symlink_to(victim), os.mkfifo):
        victim.write_bytes(copy)
        (folder / name).unlink(missing_ok=True)
        plant(folder / name)
        with pytest.warns(SparcelWarning, match=f"not kept on disk: .*{name} is a (link|pipe)"):
            assert filled(folder).stats().from_source == 40
        with pytest.warns(SparcelWarning, match=f"{name} is a (link|pipe).*; samples are read"):
            assert all_right(pickle.loads(worker))
        assert victim.read_bytes() == copy


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_no_lock_of_those_who_append_leads_out_of_a_folder(tmp_path, kind):
    filled(tmp_path / "there")[0]
    (file := tmp_path / "there" / "sparcel-samples.append.lock").unlink()
    (victim := tmp_path / "victim").write_text("mine")
    file.symlink_to(victim) if kind == "link" else os.mkfifo(file)
    cached = opened(tmp_path / "there")
    cached._disk.drop([3])
    with pytest.warns(SparcelWarning, match=f"no longer kept on disk: .*append.lock is a {kind}"):
        assert all_right(cached)
    assert cached.stats().from_disk == 39
    assert victim.read_text() == "mine"


def test_who_may_only_read_the_records_cannot_hold_up_those_who_append(tmp_path):
    before = os.umask(0)
    try:
        filled(tmp_path)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    locks = {name for name in modes if name.endswith(".lock")}
    assert modes.keys() - locks == {NAME}
    assert modes[NAME] == 0o666
    assert {modes[name] for name in locks} == {0o600}
    with (tmp_path / NAME).open("rb") as reading:
        fcntl.flock(reading, fcntl.LOCK_EX)
        cached = opened(tmp_path)
        cached._disk.drop([3])
        with silence():
            assert all_right(cached)
            assert all_right(cached)
    assert cached.stats().from_source == 1


def test_a_record_whose_class_is_gone_is_read_anew(tmp_path, monkeypatch):
    first = Cached(Given([Gone(), 1]), tmp_path, memory=0)
    assert isinstance(first[0], Gone)
    del first
    monkeypatch.delattr("tests.data.test_disk.Gone")
    again = Cached(Given([2, 1]), tmp_path, memory=0, looks=0)
    with pytest.warns(SparcelWarning, match="sample 0 was torn on disk; such samples are read an"):
        assert again.__getitems__([0, 1]) == [2, 1]
    with silence():
        assert again[0] == 2
    assert again.stats().from_disk == 1


class Gone:
    pass


def test_a_folder_that_is_removed_is_told(tmp_path):
    cached = filled(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparcelWarning)
        assert all_right(cached)
    assert cached.stats().disk_bytes == 0


def test_a_folder_stays_the_same_where_the_process_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cached = opened("a")
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    with silence():
        assert all_right(cached)
        assert all_right(pickle.loads(pickle.dumps(cached)))
    assert cached.stats().from_disk == 40


MOUNTED = """
import gc, os, shutil, subprocess, sys, warnings
from contextlib import suppress
from tests.data.sources import Files, decode, is_right
from sparcel.products.data import Cached

def run(name, length):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cached = Cached(Files(length), name, memory=0, decode=decode)
        for start in 2 * [*range(0, length, 100)]:
            places = range(start, min(start + 100, length))
            assert all(map(is_right, cached.__getitems__(places), places))
    print(cached.stats().from_disk, *(str(one.message) for one in caught), sep="|")

def fill():
    with open(os.path.join(sys.argv[1], "other"), "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass

small, large = (os.path.join(sys.argv[1], name) for name in ("small", "large"))
run(small, 500)
run(large, 20_000)  # more than fits
run(large, 20_000)
gc.collect()
shutil.rmtree(large)
fill()
run(small, 500)
os.remove(os.path.join(sys.argv[1], "other"))
run(small, 500)
gc.collect()
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
run(small, 500)
run(small, 501)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_full_and_read_only_disks_are_told_once_and_used_as_far_as_they_go(tmp_path):
    enter = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"], check=False).returncode:
        pytest.skip("no mounts of one's own here")
    mount = 'mount -t tmpfs -o size=3m tmpfs "$0" && exec "$@"'
    result = subprocess.run(
        [*enter, "sh", "-c", mount, tmp_path, sys.executable, "-c", MOUNTED, tmp_path],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    small, full, again, no_room, freed, read_only, other = (
        line.split("|") for line in result.stdout.splitlines()
    )
    assert (small, freed, read_only) == (["500"], ["1000"], ["1000"])
    assert no_room[0] == "1000" or "not kept on disk: " in no_room[1]
    assert 0 < int(full[0]) < 20_000
    assert int(again[0]) >= 2 * int(full[0]) or "not kept on disk: " in again[1]
    assert len(full) == len(again) == 2
    assert "no longer kept on disk: " in full[1]
    assert "No space left on device" in full[1]
    assert other[0] == "0"
    assert "not kept on disk: " in other[1]
    assert other[1].endswith("the folder is read-only")


@pytest.mark.processes
def test_threads_fork_at_once(tmp_path):
    cached = filled(tmp_path)
    barrier = Barrier(3)

    def fork():
        for _ in range(15):
            barrier.wait()
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)

    threads = [Thread(target=fork, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert all_right(cached)


def test_a_record_in_the_place_of_another_sample_is_torn(tmp_path):
    kept = disk.Disk(tmp_path, "samples", 2)
    kept.open(lambda *_: True, 0)
    kept.put({0: bytes(100), 1: bytes([1]) * 100})
    assert [len(record) >= 100 for record in kept.get(range(2)).values()] == [True, True]
    file = kept._opened()
    for place, entry in enumerate([file.entry(1), file.entry(0)]):
        file.enter(place, entry)
    assert [len(record) for record in kept.get(range(2)).values()] == [0, 0]
