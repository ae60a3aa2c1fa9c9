"""Steps of DDP on processes that share one card, over emulated links or loopback, for `measure.py`.

NCCL refuses two ranks on one GPU, so DDP and sparcel go over Gloo, by way of the host. Where no
network can be emulated, the ranks use loopback, and a link's time is computed from the bytes alone.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.checks import WrongResultError
from benchmarks.gpu.rank import METHODS, Job
from sparcel.errors import SparcelError
from sparcel.lab import (
    EmulatedNetwork,
    Link,
    Loopback,
    Network,
    WorkerFailedError,
    Workers,
    parse_rate,
)

RATES = ("10gbit", "1gbit")
MOST_SECONDS = 100.0
"""How long the methods may take on one network."""
START_SECONDS = 15.0
"""With less time left, none would end."""
RANK = "benchmarks.gpu.rank"

Row = dict[str, Any]


def opened(ranks: int, rate: str, reason: str) -> Network:
    """Return an emulated network with one rank on each node, or loopback and why.

    ``reason`` tells why there can be no emulated network, if that is known.
    """
    if ranks == 1 or reason:
        return Loopback(ranks, reason)
    try:
        return EmulatedNetwork(ranks, Link(parse_rate(rate)))
    except (SparcelError, OSError) as error:  # a package is missing, or the right to do so
        return Loopback(ranks, f"{type(error).__name__}: {error}".splitlines()[0])


def run(network: Network, job: Job, seconds: float) -> Iterator[Row]:
    """Yield the rows of all methods on a network; after so many seconds the ranks are ended."""
    argv = [sys.executable, "-m", RANK, json.dumps(asdict(job))]
    with Workers(network, argv) as workers:
        end = threading.Timer(seconds, workers.close)
        end.start()
        try:
            for _, line in workers.lines():
                if line.startswith("{"):
                    yield described(json.loads(line), network)
        finally:
            end.cancel()


def described(row: Row, network: Network) -> Row:
    """Return a row with its network, the bytes sent a step, and what links would take for them.

    On loopback sparcel's ranks are joined by Unix sockets, which no interface counts, and all ranks
    share the interface.
    """
    if network.link is not None:
        sent, counted_by = row["wire_bytes"], "link"
    elif row["payload_bytes"]:
        sent, counted_by = row["payload_bytes"], "sparcel"
    else:
        sent, counted_by = row["wire_bytes"] / row["ranks"], "loopback"
    rate = network.link.rate_bits_per_s if network.link else None
    return {
        "network": network.description,
        "rate_bits_per_s": rate,
        **row,
        "sent_bytes": sent,
        "counted_by": counted_by,
        "computed_link_ms": {each: 8e3 * sent / parse_rate(each) for each in RATES},
    }


def measure(ranks: tuple[int, ...], job: Job, until: float) -> Iterator[Row]:
    """Yield the rows of all networks, and a row with a note where something failed.

    Parameters
    ----------
    until
        The time, by `time.monotonic`, at which to end.

    Raises
    ------
    WrongResultError
        When a rank found a wrong result.
    """
    left = deque((count, rate) for rate in RATES for count in ranks)
    over_loopback: set[int] = set()
    reason = ""
    while left:
        count, rate = left.popleft()
        with opened(count, rate, reason) as network:
            if network.link is None:
                if count in over_loopback:
                    continue  # it has one rate
                over_loopback.add(count)
            rows, failure = [], ""
            seconds = min(MOST_SECONDS, until - time.monotonic())
            try:
                for row in run(network, job, seconds) if seconds > START_SECONDS else ():
                    rows.append(row)
                    yield row
            except WorkerFailedError as error:
                if WrongResultError.__name__ in error.output:
                    raise WrongResultError(str(error)) from error
                failure = f"failed: {error}".splitlines()[0]
            if len(rows) < len(METHODS):
                note = failure or f"the time ended after {len(rows)} methods"
                yield {"network": network.description, "ranks": count, "note": note}
            if failure and network.link is not None:
                reason = f"processes on it {failure}"
                left.appendleft((count, rate))
