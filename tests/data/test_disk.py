"""The copy on disk survives runs, kills, torn files and full disks, and nothing foreign is lost."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.data import Cached
from sparcel.errors import SparcelWarning
from tests.data.sources import (
    Files,
    Given,
    all_right,
    decode,
    killed_after,
    processes,
    read_on,
)

NAME = "sparcel-samples.sqlite"


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
    with pytest.warns(SparcelWarning, match=message):
        changed = filled(tmp_path, **settings)
    assert changed.stats().from_disk == 0
    del changed
    with silence():
        assert filled(tmp_path, looks=0, **settings).stats().from_source == 0


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


@given(st.data())
def test_a_torn_file_is_noticed_and_nothing_wrong_is_returned(tmp_path_factory, data):
    """Cut or overwritten anywhere, the file gives right samples or none, now and later."""
    folder = tmp_path_factory.mktemp("cache")
    filled(folder)
    file = folder / NAME
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        file.write_bytes(content[:at])
    else:
        length = data.draw(st.integers(1, 3000))
        content[at : at + length] = os.urandom(len(content[at : at + length]))
        file.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparcelWarning)
        for _ in range(3):
            filled(folder)
    with silence():
        assert filled(folder).stats().from_source == 0


@pytest.mark.parametrize("foreign", ["text", "database"])
def test_foreign_files_are_moved_aside(tmp_path, foreign):
    if foreign == "text":
        (tmp_path / NAME).write_text("my thesis, chapter 1 " * 20)
    else:
        with closing(sqlite3.connect(tmp_path / NAME)) as database:
            database.execute("CREATE TABLE mine (x)")
    content = (tmp_path / NAME).read_bytes()
    with pytest.warns(SparcelWarning, match=r"was not written by sparcel; it is now .*\.foreign"):
        filled(tmp_path)
    (kept,) = tmp_path.glob("*.foreign")
    assert kept.read_bytes() == content
    with silence():
        assert filled(tmp_path, looks=0).stats().from_source == 0


def test_two_runs_share_a_folder(tmp_path):
    with silence():
        one, other = opened(tmp_path), opened(tmp_path)
        assert all_right(one)
        assert all_right(other)
    assert (other.stats().from_disk, other.stats().from_source) == (40, 0)


def test_a_run_with_something_else_leaves_the_folder_to_the_one_that_uses_it(tmp_path):
    one = filled(tmp_path)
    with pytest.warns(SparcelWarning, match=r"not kept on disk: .*, and another run uses it"):
        other = filled(tmp_path, version="2")
    assert all_right(one)
    assert one.stats().from_disk == 40
    assert other.stats().disk_bytes == 0


def test_a_change_that_another_run_uses_is_made_anew_after_it(tmp_path):
    one = filled(tmp_path)
    with pytest.warns(SparcelWarning, match=r"sample \d+ of the source .* another run uses it"):
        filled(tmp_path, salt=1)
    assert all_right(one)
    del one
    with pytest.warns(SparcelWarning, match=r"sample \d+ of the source changed; it is made anew"):
        filled(tmp_path)


def fill(folder, start):
    cached = opened(folder, 200)
    for place in range(start, start + 200):
        cached[place % 200]


def test_processes_fill_it_together(tmp_path):
    filling = [processes.Process(target=fill, args=(tmp_path, at)) for at in (0, 0, 100)]
    for process in filling:
        process.start()
    for process in filling:
        process.join()
        assert process.exitcode == 0
    assert filled(tmp_path, 200).stats().from_source == 0


def test_killed_processes_leave_no_broken_cache(tmp_path):
    """Two runs at once with forked readers, all of which are killed."""
    length, seconds = 20_000, (0.8, 1.0, 1.2)
    for number, wait in enumerate(seconds):
        killed_after(wait, read_on, tmp_path, 0, length)
        with silence():
            cached = opened(tmp_path, length, looks=50)
            found = [place for place in range(0, length, 7) if cached[place][1] == place]
            assert len(found) == len(range(0, length, 7)), number
            assert cached.stats().from_disk > 0
            del cached
    with closing(sqlite3.connect(tmp_path / NAME)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_cache_that_is_gone_has_no_files_open(tmp_path):
    cached = filled(tmp_path)
    assert (tmp_path / f"{NAME}-wal").exists()
    del cached
    assert not (tmp_path / f"{NAME}-wal").exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(SparcelWarning, match="samples are not kept on disk: .*Not a directory"):
        filled(tmp_path / "file" / "folder")


MOUNTED = """
import gc, os, subprocess, sys, warnings
from tests.data.sources import Files, all_right, decode
from sparcel.data import Cached

def run(name, length):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cached = Cached(Files(length), name, memory=0, decode=decode)
        assert all_right(cached) and all_right(cached)
    print(cached.stats().from_disk, *(str(one.message) for one in caught), sep="|")

small, large = (os.path.join(sys.argv[1], name) for name in ("small", "large"))
run(small, 500)
run(large, 20_000)  # more than fits
run(large, 20_000)
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
    mount = 'mount -t tmpfs -o size=6m tmpfs "$0" && exec "$@"'
    result = subprocess.run(
        [*enter, "sh", "-c", mount, tmp_path, sys.executable, "-c", MOUNTED, tmp_path],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    small, full, again, read_only, other = (line.split("|") for line in result.stdout.splitlines())
    assert (small, read_only) == (["500"], ["1000"])
    assert 0 < int(full[0]) < 20_000
    assert len(full) == len(again) == 2
    assert "no longer kept on disk: " in full[1]
    assert "disk is full" in full[1]
    assert other[0] == "0"
    assert "not kept on disk: " in other[1]
    assert other[1].endswith("the folder is read-only")
