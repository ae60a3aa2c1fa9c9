"""Loader workers of all kinds share a cache, and may die."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from sparcel.products.data import Cached
from tests.data.sources import Files, all_right, decode, is_right, processes

LENGTH = 60


def as_it_is(samples):
    return samples


def made(folder, transform=None):
    return Cached(Files(LENGTH), folder, memory="1 MB", decode=decode, transform=transform)


@pytest.mark.processes
@pytest.mark.parametrize(("start", "persistent"), [("fork", False), ("forkserver", True)])
def test_what_a_worker_reads_all_have(tmp_path, start, persistent):
    cached = made(tmp_path)
    loader = DataLoader(
        cached,
        batch_size=7,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=start,
        persistent_workers=persistent,
        collate_fn=as_it_is,
    )
    for _ in range(2):
        read = [sample for batch in loader for sample in batch]
        assert sorted(place for _, place in read) == [*range(LENGTH)]
        assert all(is_right(sample, sample[1]) for sample in read)
    stats = cached.stats()
    assert (stats.from_source, stats.from_memory, stats.in_memory) == (LENGTH, LENGTH, LENGTH)
    del loader
    assert all_right(cached)
    assert made(tmp_path).stats().disk_bytes > 0
    assert all_right(made(tmp_path))


def dying(sample):
    if sample[1] == LENGTH // 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


TOLD = 7


def read_all(cached):
    """End with `TOLD` when torch tells that a worker died."""
    loader = DataLoader(
        cached, batch_size=4, num_workers=2, multiprocessing_context="fork", collate_fn=as_it_is
    )
    try:
        list(loader)
    except RuntimeError as error:
        if re.search(r"worker .* killed|exited unexpectedly", str(error)):
            os._exit(TOLD)  # at once, since torch may tell of it a second time
    except (EOFError, ConnectionError):  # it died while it handed a tensor over
        os._exit(TOLD)


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_worker_leaves_the_cache_whole(tmp_path):
    cached = made(tmp_path, dying)
    reading = processes.Process(target=read_all, args=(cached,))
    reading.start()
    reading.join()
    assert reading.exitcode == TOLD
    cached._transform = None
    assert all_right(cached)
    assert all_right(made(tmp_path))


def opened(process):
    """Return the inodes of a process's open files."""
    found = set()
    for name in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.add(name.stat().st_ino)
    return found


def test_memory_goes_with_the_last_process_that_uses_it():
    """It has no name, so nothing is left once no process has it open, not even after kill -9."""
    cached = made(None)
    assert all_right(cached)
    descriptor = cached._shared.name[1]
    inode = os.fstat(descriptor).st_ino
    assert os.readlink(f"/proc/self/fd/{descriptor}").endswith(" (deleted)")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    del cached
    gc.collect()
    assert inode in opened(child)
    assert inode not in opened("self")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            assert inode not in opened(process.name)
