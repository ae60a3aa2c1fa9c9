"""What it takes to publish versions and to follow them: memory and time.

    python -m benchmarks.deltas.stores FOLDER PLACE... --what behind

``FOLDER`` has consecutive weights of real fine-tuning, or gets them from `pairs.py`; they are
repeated till there are 250 million, where not said otherwise. In ``PLACE``, a path or URL in which
nothing is, they are published. Each process has one thread. There are four measurements.

**behind**: how long a reader takes that is many versions behind, of the weights as they are, with a
whole model each 50 versions; ``PLACE`` may be several. Readers that have the first version go to
the last one, and to the one before, to which no merged delta leads. ``seconds`` are the medians of
several readers; ``network`` those of reading the same files alone, one after the other.

**host**: eight workers of a host, which have weights of their own, as on a device. ``PLACE`` is in
memory, such as in /dev/shm. Workers load the first version, then the next ones, one worker after
the other: by a `Subscriber` of their own, as they do without a mirror, or by a `Mirror` that one
more process follows. ``whole_s`` and ``changed_s`` are the medians of all workers. ``beside`` are
the bytes that loading takes beside the weights: private ones of all workers, and the mirror. All is
done several times, as the time of a whole load varies with the memory at hand.

**slices**: a server of an eighth of a model. Weights are published as by default, in chunks that
are apart, and so with the code ``steps``. Readers, each a process of its own, have all tensors,
some of them, which are about an eighth of the elements, or an eighth of the rows of each.
``whole_s`` is the first version and ``changed_s`` the median of the next ones; ``beside`` the most
memory that these take beside the weights.

**large**: 7 B parameters with the shapes of Llama 2 7B. Values are normal, and each is moved by as
much as makes one in a hundred round to another. One process publishes, and notes a byte of each
weight (``bracketed``); then another one reads the whole model and applies the delta. Memory must
hold one and a half models, and ``PLACE`` one. ``cpu_s`` is processor time, ``peak`` the bytes of
memory of its own (not of files) at most, beside the weights.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.clock import alone, process_bytes, resident, took
from benchmarks.deltas.pairs import pairs, tiled
from benchmarks.record import RESULTS, Row, machine, options, show, write
from sparcel.products import delta
from sparcel.products.delta.index import INDEX
from sparcel.products.stores import read_at_most

LR = 1e-6
ELEMENTS = 250_000_000
VERSIONS = 4


def behind(told: argparse.Namespace, about: Row) -> Iterator[Row]:
    """Yield the rows of readers that are many versions behind."""
    files = pairs(told.folder, [LR], FAR)[LR]
    for place in told.places:
        store = delta.store_at(place)
        if delta.read_index(store).newest is None:
            publisher = delta.Publisher(store, anchor_every=FAR - 1, lag=FAR)
            for file in files:
                publisher.publish(load_file(file))
        yield from (going_to(store, to) for to in (FAR - 1, FAR - 2))


FAR, READERS = 51, 9


def going_to(store: delta.Store, to: int) -> Row:
    """Return the row of readers that go from the first version to another one."""
    seconds, network, names = [], [], list[str]()
    for _ in range(READERS):
        reader = delta.Subscriber(store)
        reader.update(0)
        with patch("sparcel.products.delta.kept.read_at_most", wraps=read_at_most) as reads:
            update = took(reader.update, to)
        reader.verify()
        seconds.append(update.seconds)
        names = [call.args[1] for call in reads.call_args_list]
        network.append(sum(took(store.read, name).seconds for name in [INDEX, *names]))
    return {
        "store": type(store).__name__,
        "versions": to,
        "files": len(names),
        "bytes": update.result.bytes,
        "seconds": median(seconds),
        "network": median(network),
    }


WORKERS, RUNS = 8, 4


class Worker:
    """Keeps weights of its own at the versions of a mirror, or of a store."""

    def __init__(self, mirror: Path | None, store: Path) -> None:
        self._source = delta.Subscriber(store) if mirror is None else delta.Mirror(mirror)
        self.weights: dict[str, Tensor] = {}

    def load(self) -> None:
        """Go to the newest version."""
        found = self._source.update()
        assert found is not None
        if not self.weights:
            tensors = self._source.tensors
            self.weights = {name: one.flatten().clone() for name, one in tensors.items()}
            return
        for change in found.changes():
            assert change.values is not None
            self.weights[change.name][change.indices] = change.values


def work(orders: Connection, mirror: Path | None, store: Path) -> None:
    """Load when told, and tell how long that took, and the memory beside the weights."""
    torch.set_num_threads(1)
    worker, before = Worker(mirror, store), _private()
    while orders.recv():
        seconds = took(worker.load).seconds
        own = sum(tensor.nbytes for tensor in worker.weights.values())
        orders.send((seconds, _private() - own - before))


def _private() -> int:
    """Return the bytes of memory that this process alone has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = dict(line.split()[:2] for line in lines[1:])
    return 1024 * sum(int(sizes[f"Private_{kind}:"]) for kind in ("Clean", "Dirty"))


def loaded(mirror: Path | None, store: Path, publish: Iterable[Callable[[], object]]) -> Row:
    """Return what it takes workers to load versions."""
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
        seconds.append(median(one for one, _ in loads))
        beside = sum(size for _, size in loads)
    for (orders, _), worker in zip(pipes, workers, strict=True):
        orders.send(False)
        worker.join()
    if mirror is not None:
        beside += sum(file.stat().st_size for file in mirror.iterdir())
        shutil.rmtree(mirror)
    shutil.rmtree(store)
    return {"whole_s": seconds[0], "changed_s": median(seconds[1:]), "beside": beside}


def host(told: argparse.Namespace, about: Row) -> Iterator[Row]:
    """Yield the rows of eight workers."""
    files, place = pairs(told.folder, [LR], VERSIONS)[LR], Path(told.places[0])
    versions = [tiled(file, ELEMENTS) for file in files]
    elements = sum(tensor.numel() for tensor in versions[0].values())
    about |= {"elements": elements, "workers": WORKERS}
    ways = ("a subscriber each", None), ("one mirror", place / "mirror")
    for label, mirror in ways * RUNS:
        publisher = delta.Publisher(place / "store")
        steps = [partial(publisher.publish, model) for model in versions]
        yield {"way": label, **loaded(mirror, place / "store", steps)}


PART = 8
PUBLISHERS: dict[str, dict[str, Any]] = {
    "default": {},
    "apart": {"apart": True},
    "apart, steps": {"apart": True, "code": "steps"},
}
SERVERS = {"default": ["all"], "apart": ["all", "names"], "apart, steps": ["all", "names", "rows"]}
"""Which readers each publisher has."""


def slices(told: argparse.Namespace, about: Row) -> Iterator[Row]:
    """Yield the rows of servers that have an eighth."""
    files = pairs(told.folder, [LR], VERSIONS)[LR]
    for name, settings in PUBLISHERS.items():
        store = Path(told.places[0], name.replace(", ", "-"))
        publisher = delta.Publisher(store, **settings)
        for file in files:
            weights = tiled(file, ELEMENTS)
            publisher.publish(weights)
        for reader in SERVERS[name]:
            only = asked_of(reader, {key: one.shape for key, one in weights.items()})
            yield {"publisher": name, "reader": reader, **alone(read, store, only)}


def asked_of(reader: str, sizes: dict[str, torch.Size]) -> dict[str, Any] | None:
    """Return what a reader asks for."""
    if reader == "all":
        return None
    if reader == "rows":
        return {name: slice(0, shape[0] // PART) for name, shape in sizes.items()}
    room, mine = sum(map(torch.Size.numel, sizes.values())) // PART, {}
    for name, shape in sorted(sizes.items(), key=lambda one: one[1].numel()):
        if shape.numel() <= room:
            room -= shape.numel()
            mine[name] = ...
    return mine


def read(store: Path, only: dict[str, Any] | None) -> Row:
    """Go from version to version, and return what that takes."""
    torch.set_num_threads(1)
    reader, seconds, sizes = delta.Subscriber(store, only=only), [], []
    for number in range(VERSIONS):
        before = resident()
        update = took(reader.update, number)
        seconds.append(update.seconds)
        sizes.append(update.result.bytes)
    reader.verify()
    return {
        "elements": sum(tensor.numel() for tensor in reader.tensors.values()),
        "whole_bytes": sizes[0],
        "whole_s": seconds[0],
        "changed_bytes": median(sizes[1:]),
        "changed_s": median(seconds[1:]),
        "beside": process_bytes("VmHWM") - before,
    }


LAYERS, WIDTH, INNER, WORDS = 32, 4096, 11008, 32000
SCALE, MOVED = 0.02, 6e-7
"""Of the weights, and of what moves them, which was tried so that 1 % change."""


def large(told: argparse.Namespace, about: Row) -> Iterator[Row]:
    """Yield the rows of a model of 7 B parameters."""
    store = Path(told.places[0], "store")
    for side in (publishing, serving):
        yield from alone(side, store)
    (step,) = (entry for entry in delta.read_index(store).entries if entry.kind == "delta")
    about |= {name: getattr(step, name) for name in ("elements", "changed", "bytes")}


def llama() -> dict[str, Tensor]:
    """Return the model's weights."""
    layer = {
        **{f"self_attn.{x}_proj": (WIDTH, WIDTH) for x in "qkvo"},
        **{f"mlp.{x}_proj": (INNER, WIDTH) for x in ("gate", "up")},
        "mlp.down_proj": (WIDTH, INNER),
    }
    shapes = {
        "model.embed_tokens.weight": (WORDS, WIDTH),
        "lm_head.weight": (WORDS, WIDTH),
        **{f"model.layers.{i}.{n}.weight": s for i in range(LAYERS) for n, s in layer.items()},
    }
    torch.manual_seed(0)
    return {
        name: torch.randn(shape, dtype=torch.bfloat16).mul_(SCALE) for name, shape in shapes.items()
    }


def watched(what: str, job: Callable[..., Any], *arguments: Any) -> Row:
    """Return what some work takes; its memory is looked at a hundred times a second."""
    ended, before, peak = Event(), process_bytes("RssAnon"), 0

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            peak = max(peak, process_bytes("RssAnon"))

    thread = Thread(target=watch)
    thread.start()
    seconds, busy, version = took(job, *arguments)
    ended.set()
    thread.join()
    row = {"what": what, "seconds": seconds, "cpu_s": busy}
    return {**row, "peak": peak - before, "version": str(version)}


def publishing(store: Path) -> list[Row]:
    """Publish the model, and a step that moves all weights."""
    model = llama()
    publisher = delta.Publisher(store, bracketed=True)
    rows = [watched("publish the whole model", publisher.publish, model)]
    for tensor in model.values():
        tensor.copy_(tensor.float().add_(torch.randn(tensor.shape).sign_(), alpha=MOVED))
    return [*rows, watched("publish a step", publisher.publish, model)]


def serving(store: Path) -> list[Row]:
    """Read the model, and a step."""
    subscriber = delta.Subscriber(store)

    def update(to: int) -> delta.Version:
        done = subscriber.update(to)
        assert done is not None
        return done.version

    rows = [watched("read the whole model", update, 0)]
    rows.append(watched("read, check and apply a step", update, 1))
    subscriber.verify()
    return rows


MEASURED = {"behind": behind, "host": host, "slices": slices, "large": large}


def main() -> None:
    told = options(
        __doc__, "folder", "places", what={"choices": MEASURED, "required": True}, output=Path
    )
    if told.what == "behind":
        torch.set_num_threads(1)
    origin, about = machine(), Row()
    rows = list(MEASURED[told.what](told, about))
    write(told.output or RESULTS / f"deltas_{told.what}.json", {**origin, **about}, rows)
    show(rows)
    print(about)


if __name__ == "__main__":
    main()
