"""Jobs of deltas in several threads, whose results come in order.

On a GPU they are in the stream of the thread that calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from sparcel import _threads

T = TypeVar("T")


def in_threads(jobs: Iterator[Callable[[], T]]) -> Iterator[T]:
    """Run jobs in as many threads as torch uses, and yield their results."""
    return _threads.in_order(_in_this_stream(), jobs, torch.get_num_threads())


def in_pool(jobs: Iterator[Callable[[], T]], threads: int) -> Iterator[T]:
    """Run jobs in other threads than the one that calls, which an interrupt could stop."""
    return _threads.in_pool(_in_this_stream(), jobs, threads)


def _in_this_stream() -> Callable[[Callable[[], T]], T]:
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(job: Callable[[], T]) -> T:
        with torch.cuda.stream(stream):
            return job()

    return run
