"""From a step's end until eight servers serve its weights: changes, lists of them, or all weights.

Run it in each rank of an emulated cluster, whose first rank trains, and whose others serve:

    sparcel lab run --nodes 9 --rate 1gbit -- python -m benchmarks.deltas.fleet FOLDER \
        --output benchmarks/results/delta_fleet_1gbit.json

Also at 100 Mbit/s (`--rate 100mbit`, delta_fleet_100mbit.json). ``FOLDER`` has consecutive weights
of real fine-tuning, from `pairs.py`. Transports (`transports.py`) take turns; after the
last version all go back to the first, which is not timed, and after the first round the sums of
all servers' weights are compared with the trainer's.

``ms`` is the time from the trainer's step to the last server's new weights, on the one clock of the
machine: the median of all steps, as are the others. ``prepare_ms`` are the trainer's until it
begins to send, ``pause_ms`` the slowest server's time in which weights are written, and
``pause_cpu_ms`` its processor time, of the same server. Weights that are broadcast whole are
written as they arrive. All ranks share the cores of one machine; ``alone_ms`` is what applying the
chunks of a version takes one server while all others wait, and ``at_once_ms`` all of them, the
slowest: both from memory, medians. ``payload_bytes`` are those of a message, ``sent_bytes`` crossed
the trainer's link, and ``received_bytes`` those of all servers, headers and a barrier included;
``fewer_bytes`` compares these with those of a broadcast of all weights. ``line_ms`` is what a link
takes to carry a message once, which no broadcast can beat; Gloo's tree takes several times that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.clock import gloo, took
from benchmarks.deltas.pairs import pairs
from benchmarks.deltas.transports import DELTA, DENSE, TRANSPORTS, Model, Transport, models
from benchmarks.record import Row, network, options, report
from sparcel.products import delta
from sparcel.tools.lab import link_bytes

VERSIONS = 4
LR = 1e-6
REPEATS = 5


def timed(transport: Transport, number: int) -> Row:
    """Return the figures of one step, on the clock that all ranks have; all call."""
    dist.barrier()
    before, start = _link(), perf_counter()
    transport.step(number)
    end = perf_counter()
    dist.barrier()
    after = _link()
    told = [start, end, *transport.pause, transport.prepared - start]
    told += [float(late - early) for early, late in zip(before, after, strict=True)]
    every = _gathered(torch.tensor([*told, transport.payload], dtype=torch.float64))
    trainer, servers = every[0], every[1:]
    pause, busy = servers[servers[:, 2].argmax(), 2:4].tolist()
    return {
        "ms": 1e3 * float(servers[:, 1].max() - trainer[0]),
        "prepare_ms": 1e3 * float(trainer[4]),
        "pause_ms": 1e3 * pause,
        "pause_cpu_ms": 1e3 * busy,
        "payload_bytes": int(trainer[7]),
        "sent_bytes": int(trainer[5]),
        "received_bytes": int(servers[:, 6].sum()),
    }


def _link() -> tuple[int, int]:
    carried = link_bytes()
    assert carried is not None, "run it in the lab, with a rate"
    return carried


def _gathered(figures: Tensor) -> Tensor:
    every = [torch.empty_like(figures) for _ in range(dist.get_world_size())]
    dist.all_gather(every, figures)
    return torch.stack(every)


def steps(versions: Sequence[Model], folder: Path, rounds: int) -> Iterator[Row]:
    """Yield a row for each transport, and for applying alone; all ranks call."""
    found = dict[str, list[Row]]()
    transports = [one(versions, folder) for one in TRANSPORTS]
    for turn, number in product(range(-1, rounds), range(1, VERSIONS + 1)):
        for transport in transports:
            row = timed(transport, number % VERSIONS)
            if turn < 0:
                _check(transport, number % VERSIONS, versions)
            elif number < VERSIONS:
                found.setdefault(transport.label, []).append(row)
    whole = found[DENSE]
    for label, rows in found.items():
        middle = {name: _middle(rows, name) for name in rows[0]}
        fewer = _middle(whole, "received_bytes") / middle["received_bytes"]
        line_ms = 8e3 * middle["payload_bytes"] / float(os.environ["SPARCEL_LAB_RATE_BITS_PER_S"])
        all_ms = {f"all_{name}": [row[name] for row in rows] for name in ("ms", "pause_ms")}
        yield {"transport": label, "fewer_bytes": fewer, "line_ms": line_ms, **middle, **all_ms}
    yield _passes(versions, _middle(found[DELTA], "pause_ms"))
    for transport in transports:
        transport.close()


def _middle(rows: Sequence[Row], name: str) -> float:
    return median(float(row[name]) for row in rows)


def _check(transport: Transport, number: int, versions: Sequence[Model]) -> None:
    """Compare what all ranks have with the trainer's version, by its sum."""
    mine = versions[number] if dist.get_rank() == 0 else transport.served
    total = delta.version_of(mine.tensors).sum
    sums = _gathered(torch.tensor([total - (1 << 63)])).flatten().tolist()
    if len(set(sums)) > 1:
        raise SystemExit(f"{transport.label}: not all ranks have version {number}")


def _passes(versions: Sequence[Model], pause_ms: float) -> Row:
    """Time applying by itself: all servers at once, and one while the others wait."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held: list[Any] = [None]
    if rank == 0:
        held = [list(delta.encode(versions[1].tensors, versions[0].tensors))]
    dist.broadcast_object_list(held)
    target = versions[0].copy()
    at_once, alone = [], []
    for _ in range(REPEATS):
        dist.barrier()
        own = _applied(target, held[0]) if rank else (0.0, 0.0)
        at_once.append(float(_gathered(torch.tensor(own))[1:, 0].max()))
        for server in range(1, ranks):
            dist.barrier()
            if rank == server:
                own = _applied(target, held[0])
        alone.append(_gathered(torch.tensor(own))[1:])
    middle = torch.cat(alone).median(0).values.tolist()
    return {
        "transport": "applying alone",
        "alone_ms": 1e3 * middle[0],
        "alone_cpu_ms": 1e3 * middle[1],
        "at_once_ms": 1e3 * median(at_once),
        "pause_over_alone": pause_ms / (1e3 * middle[0]),
        "pause_over_at_once": pause_ms / (1e3 * median(at_once)),
    }


def _applied(target: Model, chunks: Sequence[bytes]) -> tuple[float, float]:
    seconds, busy, inverse = took(delta.apply_, target.tensors, chunks)
    inverse.undo()
    return seconds, busy


def main() -> None:
    given = options(__doc__, "folder", rounds=3, output=Path)
    with gloo() as rank:
        if rank == 0:
            pairs(given.folder, [LR], VERSIONS)
        dist.barrier()
        files = pairs(given.folder, [LR], VERSIONS)[LR]
        rows = list(steps(models(files), given.folder, given.rounds))
        if rank == 0:
            report(given.output, rows, network=network(), lr=LR)


if __name__ == "__main__":
    main()
