"""Eight workers of a host, each with a copy of the weights, or all with one: memory and time.

    python -m benchmarks.deltas.host FOLDER PLACE

``FOLDER`` has pairs of weights of real fine-tuning, or gets them from `pairs.py`; they are repeated
till there are 250 million. ``PLACE`` is a folder in memory, such as one in /dev/shm. Workers have
weights of their own, as on a device. They load the first version, then the next ones, one worker
after the other: by a `Subscriber` of their own, as they do without a mirror, or by a `Mirror` that
one more process follows. ``whole_s`` and ``changed_s`` are the medians of all workers. ``beside``
are the bytes that loading takes beside the weights: private ones of all workers, and the mirror.
All is done several times, as the time of a whole load varies with the memory at hand.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.deltas.pairs import pairs, tiled
from benchmarks.record import RESULTS, Row, machine, options, show, write
from sparcel.products import delta

LR = 1e-6
ELEMENTS = 250_000_000
VERSIONS, WORKERS, RUNS = 4, 8, 4


class Worker:
    """Keeps weights of its own at the versions of a mirror, or of a store."""

    def __init__(self, mirror: Path | None, store: Path) -> None:
        self._mirror = None if mirror is None else delta.Mirror(mirror)
        self._subscriber = delta.Subscriber(store)
        self.weights: dict[str, Tensor] = {}

    def load(self) -> None:
        """Go to the newest version."""
        found = self._subscriber.update() if self._mirror is None else self._mirror.update()
        assert found is not None
        if not self.weights:
            source = self._subscriber if self._mirror is None else self._mirror
            self.weights = {name: one.flatten().clone() for name, one in source.tensors.items()}
            return
        for change in found.changes():
            assert change.values is not None
            self.weights[change.name][change.indices] = change.values


def work(orders: Connection, mirror: Path | None, store: Path) -> None:
    """Load when told, and tell how long that took, and the memory beside the weights."""
    torch.set_num_threads(1)
    worker, before = Worker(mirror, store), _private()
    while orders.recv():
        start = perf_counter()
        worker.load()
        seconds = perf_counter() - start
        own = sum(tensor.nbytes for tensor in worker.weights.values())
        orders.send((seconds, _private() - own - before))


def _private() -> int:
    """Return the bytes of memory that this process alone has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = dict(line.split()[:2] for line in lines[1:])
    return 1024 * sum(int(sizes[f"Private_{kind}:"]) for kind in ("Clean", "Dirty"))


def measured(
    label: str, mirror: Path | None, store: Path, publish: Iterable[Callable[[], object]]
) -> Row:
    """Return the row of workers that load two versions."""
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(WORKERS)]
    workers = [context.Process(target=work, args=(told, mirror, store)) for _, told in pipes]
    follower = None
    seconds, beside = list[float](), 0
    for step, publication in enumerate(publish):
        publication()
        if mirror is not None:
            follower = follower or delta.Follower(store, mirror)
            follower.update()
        if not step:
            for worker in workers:
                worker.start()
        loads = []
        for orders, _ in pipes:
            orders.send(True)
            loads.append(orders.recv())
        seconds.append(median(took for took, _ in loads))
        beside = sum(size for _, size in loads)
    for orders, _ in pipes:
        orders.send(False)
    for worker in workers:
        worker.join()
    if mirror is not None:
        beside += sum(file.stat().st_size for file in mirror.iterdir())
        shutil.rmtree(mirror)
    shutil.rmtree(store)
    return {"way": label, "whole_s": seconds[0], "changed_s": median(seconds[1:]), "beside": beside}


def main() -> None:
    given = options(__doc__, "folder", "place", output=RESULTS / "deltas_host.json")
    origin = machine(FOLDER=given.folder, PLACE=given.place)
    versions = [tiled(file, ELEMENTS) for file in pairs(given.folder, [LR], VERSIONS)[LR]]
    rows = []
    ways = ("a subscriber each", None), ("one mirror", given.place / "mirror")
    for label, mirror in ways * RUNS:
        store = given.place / "store"
        publisher = delta.Publisher(store)
        steps = [partial(publisher.publish, model) for model in versions]
        rows.append(measured(label, mirror, store, steps))
    elements = sum(tensor.numel() for tensor in versions[0].values())
    write(given.output, {**origin, "elements": elements, "workers": WORKERS}, rows)
    show(rows)


if __name__ == "__main__":
    main()
