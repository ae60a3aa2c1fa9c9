"""Work on several threads, with results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

In = TypeVar("In")
Out = TypeVar("Out")


def in_order(
    run: Callable[[In], Out], items: Iterable[In], threads: int | None = None
) -> Iterator[Out]:
    """Yield ``run(item)`` for each item in turn, while threads work on the few next ones.

    By default they are as many as torch uses.
    """
    threads = threads or torch.get_num_threads()
    yield from map(run, items) if threads == 1 else in_pool(run, items, threads)


def in_pool(run: Callable[[In], Out], items: Iterable[In], threads: int) -> Iterator[Out]:
    """Do the same on other threads than the one that calls, which an interrupt could stop.

    On a GPU they are in its stream. All that have begun are awaited, unless a second interrupt
    comes.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def work(item: In) -> Out:
        with torch.cuda.stream(stream):
            return run(item)

    with ThreadPoolExecutor(threads) as pool:
        running: deque[Future[Out]] = deque()
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
