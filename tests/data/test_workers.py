"""Loader workers of all kinds share a cache, and may die."""

from __future__ import annotations

import os
import signal
import time

import pytest
from torch.utils.data import DataLoader

from sparcel.data import Cached
from tests.data.sources import Files, all_right, decode, is_right

LENGTH = 60


def as_it_is(samples):
    return samples


def made(folder, transform=None):
    return Cached(Files(LENGTH), folder, memory="1 MB", decode=decode, transform=transform)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("start", "persistent"), [("fork", False), ("fork", True), ("forkserver", True)]
)
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


@pytest.mark.processes
def test_a_killed_worker_leaves_the_cache_whole(tmp_path):
    cached = made(tmp_path, dying)
    loader = DataLoader(
        cached, batch_size=4, num_workers=2, multiprocessing_context="fork", collate_fn=as_it_is
    )
    with pytest.raises(RuntimeError, match=r"worker .* killed|exited unexpectedly"):
        list(loader)
    del loader
    cached._transform = None
    assert all_right(cached)
    assert all_right(made(tmp_path))


def test_memory_goes_with_the_last_process_that_uses_it():
    """A child that is killed holds it no longer than the parent, which needs no clean-up."""
    cached = made(None)
    assert all_right(cached)
    pid, descriptor, _ = cached._shared.name
    inode = os.fstat(descriptor).st_ino
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    del cached
    assert os.stat(f"/proc/{child}/fd/{descriptor}").st_ino == inode
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = [os.stat(f"/proc/{pid}/fd/{name}").st_ino for name in os.listdir(f"/proc/{pid}/fd")[:-1]]
    assert inode not in left
