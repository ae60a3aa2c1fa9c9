"""Jobs in several threads, whose results come in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def in_threads(jobs: Iterator[Callable[[], T]]) -> Iterator[T]:
    """Run jobs in as many threads as torch uses, and yield their results in order."""
    threads = torch.get_num_threads()
    yield from in_pool(jobs, threads) if threads > 1 else (job() for job in jobs)


def in_pool(jobs: Iterator[Callable[[], T]], threads: int) -> Iterator[T]:
    """Run jobs in other threads than the one that calls, and yield their results in order.

    On a GPU they are in the stream of the one that calls. All that have begun are awaited, unless
    a second interrupt comes.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(job: Callable[[], T]) -> T:
        with torch.cuda.stream(stream):
            return job()

    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[T]] = deque()
        for job in jobs:
            waiting.append(pool.submit(run, job))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
