"""Datasets for the tests, and what processes do with them; importable by spawned workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparcel.products.data import Cached
from sparcel.products.data.shared import Shared
from tests import workers  # makes the server that processes are forked from import torch

assert workers
processes = get_context("forkserver")

LARGE = 1 << 24
LATEST = time.monotonic() + 120
"""When processes end that were not killed."""


class Given(Dataset[Any]):
    """Has the samples that it is given, and counts how often each is read."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples, self.reads = list(samples), [0] * len(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> Any:
        self.reads[place] += 1
        return self.samples[place]


class Files(Dataset[Any]):
    """Samples that are bytes and a label, and name themselves; ``salt`` changes all of them."""

    def __init__(self, length: int, salt: int = 0) -> None:
        self.length, self.salt = length, salt

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> tuple[bytes, int]:
        assert 0 <= place < self.length
        return self.content(place), place

    def content(self, place: int) -> bytes:
        return bytes([self.salt, place % 251]) * (50 + place % 7)


def decode(sample: tuple[bytes, int]) -> tuple[Tensor, int]:
    content, place = sample
    return torch.tensor(list(content), dtype=torch.float32), place


def is_right(sample: tuple[Tensor, int], place: int, salt: int = 0) -> bool:
    expected, _ = decode(Files(LARGE, salt)[place])
    return sample[1] == place and torch.equal(sample[0], expected)


def all_right(cached: Cached, salt: int = 0) -> bool:
    return all(is_right(cached[place], place, salt) for place in range(len(cached)))


def read_on(begun: Callable[[], None], folder: Path, salt: int, length: int) -> None:
    """Read batches in two runs at once, each with a forked process, until killed."""
    os.fork()
    cached = Cached(Files(length, salt), folder, memory="1 MB", decode=decode)
    os.fork()
    while time.monotonic() < LATEST:
        for start in range(0, length, 8):
            cached.__getitems__(range(start, min(start + 8, length)))
            begun()


def put_on(begun: Callable[[], None], shared: Shared, length: int) -> None:
    """Put records, and free half of them, until killed."""
    while time.monotonic() < LATEST:
        for place in range(length):
            shared.put(place, record_of(place))
            begun()
        shared.hold(np.random.default_rng().permutation(length)[: length // 2])


def record_of(place: int) -> bytes:
    return place.to_bytes(8, "little") * (100 + place % 50)


def killed_after(seconds: float, function: Callable[..., None], *arguments: Any) -> None:
    """Run a function in a process of its own, and kill it with all its children.

    It gets another function before its arguments, and is killed so many seconds after it, or one
    of its children, has first called that.
    """
    begun = processes.Event()
    process = processes.Process(
        target=_in_a_session, args=(function, begun.set, *arguments), daemon=True
    )
    process.start()
    assert begun.wait(60)
    time.sleep(seconds)
    os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _in_a_session(function: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    function(*arguments)
