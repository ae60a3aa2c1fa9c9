"""Islands for tests: threads of this process that share nothing but a bucket."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from sparcel.core.comm import Communicator, ConnectedCommunicator
from sparcel.products.outer import history, places
from sparcel.products.outer.bucket import BucketRendezvous
from sparcel.products.outer.files import BucketStore
from sparcel.products.stores import Store

PATIENCE = 60.0
"""Longer than any exchange takes, so that only an island that nobody waits for is late."""


@contextmanager
def looking_often() -> Iterator[None]:
    """Let islands look often, and give signs of life often: half a second without one is death."""
    often = patch.multiple(places, LOOKED_SECONDS=0.05, ASKED_SECONDS=0.05)
    with often, patch.object(history, "_MOST_SECONDS", 0.2):
        yield


def all_at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what functions return, each called on a thread of its own, or the errors."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))


def connect(
    place: Store | str, size: int, rank: int, timeout: float = PATIENCE, prefix: str = "run"
) -> ConnectedCommunicator:
    """Return the communicator of an island."""
    store = BucketStore(place).under(prefix)
    return ConnectedCommunicator(BucketRendezvous(store, list(range(size)), rank, timeout))


def on_islands(
    place: Any, size: int, function: Callable[..., Any], *args: Any, timeout: Any = PATIENCE
) -> list[Any]:
    """Return what ``function(comm, *args)`` returns, or raises, on islands of one bucket, by rank.

    ``place`` is what a `BucketStore` takes, and ``timeout`` seconds, or a list of that, by rank.
    """
    prefix = secrets.token_hex(4)

    def island(rank: int) -> Any:
        own, seconds = (one[rank] if isinstance(one, list) else one for one in (place, timeout))
        comm = connect(own, size, rank, seconds, prefix)
        try:
            return function(comm, *args)
        finally:
            comm.close()

    return all_at_once([partial(island, rank) for rank in range(size)])


def raised(outcomes: Sequence[Any]) -> Sequence[Any]:
    """Return the outcomes, unless one of them is an error, which is raised."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def gathers(comm: Communicator, times: int = 1) -> list[int]:
    """Return the ranks, as each rank told them."""
    for _ in range(times):
        numbers = comm.gather_numbers(comm.rank)
    return numbers
