"""Read images from a slow store, with and without `sparcel.data.Cached`, and train on them.

Run it in each rank of an emulated cluster; the last rank is the store, an HTTP server, and the
others read from it:

    sparcel lab run --nodes 2 --rate 100mbit -- python -m benchmarks.data.cache DATA \
        --network 100mbit --output benchmarks/results/data_cache.json

``DATA`` is the folder that holds CIFAR-10's JPEGs, ``train.tar.xz``. The set ``cifar`` is a part of
these; ``photos`` are the same images, enlarged to 256×256 with noise, whose JPEGs take about 60 KB.
What the link gives is measured first: the median time of a request without content, and the rate
of a large answer. Nothing waits but for the network. Rows that the output has are not repeated.
"""

from __future__ import annotations

import http.client
import io
import os
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.clock import gathered, gloo, took
from benchmarks.pages.tables import table
from benchmarks.record import NEEDED, Row, grouped, options, run_here
from benchmarks.server import serving
from benchmarks.training.models import residual_network
from sparcel.products.data import Cached, PartSampler

Change = Callable[[Any], Any]
Consume = Callable[[Tensor, Tensor], object]

PORT = 8080
LARGE_ANSWER = 20_000_000
BATCH = 64
EPOCHS = 3
FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}
LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "2 forked": FORKED,
    "2 forked, persistent": {**FORKED, "persistent_workers": True},
    "2 spawned, persistent": {
        "num_workers": 2,
        "multiprocessing_context": "spawn",
        "persistent_workers": True,
    },
}
COUNTS = {"cifar": 5000, "photos": 1000}
MEMORY = {"cifar": "128 MB", "photos": "256 MB"}


def images_of(data: Path, name: str) -> Iterator[bytes]:
    """Yield the answers of the store: a byte for the label, and the JPEG."""
    with tarfile.open(data / "train.tar.xz") as files:
        members = [one for one in files if one.name.endswith(".jpg")]
        labels = sorted({one.name.split("/")[-2] for one in members})
        chosen = np.random.default_rng(0).choice(len(members), COUNTS[name], replace=False)
        for place in sorted(chosen):
            content = files.extractfile(members[place])
            assert content is not None
            label = labels.index(members[place].name.split("/")[-2])
            jpeg = content.read()
            yield bytes([label]) + (jpeg if name == "cifar" else enlarged(jpeg, place))


def enlarged(jpeg: bytes, seed: int) -> bytes:
    """Return a JPEG of 256×256 pixels with as much detail as a photo."""
    image = Image.open(io.BytesIO(jpeg)).resize((256, 256), Image.Resampling.BICUBIC)
    noise = np.random.default_rng(seed).normal(0, 12, (256, 256, 3))
    pixels = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=92)
    return stream.getvalue()


@contextmanager
def store(data: Path) -> Iterator[None]:
    """Serve ``/SET/NUMBER``, ``/ping`` and ``/large`` until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ping").touch()
        Path(folder, "large").write_bytes(bytes(LARGE_ANSWER))
        for name in COUNTS:
            Path(folder, name).mkdir()
            for number, answer in enumerate(images_of(data, name)):
                Path(folder, name, str(number)).write_bytes(answer)
        server = serving(folder, PORT)
        yield
        server.shutdown()


_local = threading.local()


def get(host: str, path: str) -> bytes:
    """Return an answer of the store, over a connection of this thread and process."""
    if getattr(_local, "pid", None) != os.getpid():
        _local.pid, _local.connection = os.getpid(), http.client.HTTPConnection(host, PORT)
    _local.connection.request("GET", path)
    content: bytes = _local.connection.getresponse().read()
    return content


class Remote(Dataset[tuple[bytes, int]]):
    """The images of the store as they are: files and labels."""

    def __init__(self, host: str, name: str) -> None:
        self.host, self.name = host, name

    def __len__(self) -> int:
        return COUNTS[self.name]

    def __getitem__(self, place: int) -> tuple[bytes, int]:
        content = get(self.host, f"/{self.name}/{place}")
        return content[1:], content[0]


def decode(sample: tuple[bytes, int]) -> tuple[Tensor, int]:
    """Decode, scale larger images to 96×96, and normalise."""
    image = Image.open(io.BytesIO(sample[0]))
    if image.width > 96:
        image = image.resize((96, 96), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
    return (pixels - 120) / 64, sample[1]


def flip(sample: tuple[Tensor, int]) -> tuple[Tensor, int]:
    """Mirror every other image, at random."""
    return (sample[0].flip(2) if torch.rand(()) < 0.5 else sample[0]), sample[1]


class Uncached(Dataset[Any]):
    """Samples that are read, decoded and transformed whenever they are asked for."""

    def __init__(self, source: Any, decode: Change, transform: Change) -> None:
        self.source, self.decode, self.transform = source, decode, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.decode(self.source[index]))


def epochs(
    dataset: Dataset[Any], readers: dist.ProcessGroup, loader: str, number: int, consume: Consume
) -> list[float]:
    """Return the seconds of each epoch, until the last rank has done it."""
    sampler = PartSampler(dataset, readers)  # type: ignore[arg-type]
    batches = DataLoader(dataset, BATCH, sampler=sampler, **LOADERS[loader])
    seconds = []
    for epoch in range(number):
        sampler.set_epoch(epoch)
        dist.barrier(readers)
        start = perf_counter()
        for images, labels in batches:
            consume(images, labels)
        dist.barrier(readers)
        seconds.append(round(perf_counter() - start, 4))
    return seconds


def trainer() -> Consume:
    """Return a function that trains a small network on a batch."""
    torch.manual_seed(0)
    model = residual_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def measured(host: str, folder: Path, readers: dist.ProcessGroup, **job: Any) -> Row:
    """Return the seconds of the epochs of one job, without a cache and with one in two runs."""
    source, training = Remote(host, job["set"]), job["work"] == "training"

    def run(dataset: Dataset[Any], number: int) -> list[float]:
        consume = trainer() if training else lambda images, labels: None
        return epochs(dataset, readers, job["loader"], number, consume)

    def cached() -> Cached:
        return Cached(
            source,
            folder,
            memory=MEMORY[job["set"]],
            decode=decode,
            transform=flip,
            threads=job["threads"],
            group=readers,
        )

    shutil.rmtree(folder, ignore_errors=True)
    plain = run(Uncached(source, decode, flip), 2)
    first = cached()
    cold = run(first, EPOCHS)
    stats = first.stats()
    del first
    return {
        "images": len(source),
        "plain_s": plain,
        "cached_s": cold,
        "second_run_s": run(cached(), 2),
        "memory_bytes": stats.memory_bytes,
        "disk_bytes": stats.disk_bytes,
        "in_memory": stats.in_memory,
    }


def link(host: str) -> Row:
    """Return what the link to the store gives."""
    times = [took(get, host, "/ping").seconds for _ in range(200)]
    rate = 8 * LARGE_ANSWER / took(get, host, "/large").seconds
    return {"request_ms": round(median(times) * 1e3, 3), "mbit_s": round(rate / 1e6, 1)}


SHOWN = "2 forked, persistent"
"""The loader of which the page has rows."""


def cache_table(rows: list[Row]) -> Iterator[str]:
    """Yield the table of epochs that read or train, without a cache and with a full one."""
    found = grouped((row for row in rows if row["loader"] == SHOWN), "network", "set")
    cells = (
        (
            *place,
            *(f"{min(one):.2f}" for row in own for one in (row["plain_s"], row["cached_s"][1:])),
        )
        for place, own in found.items()
    )
    return table(("network", "set", "reading", "cached", "training", "cached"), cells)


def jobs(network: str) -> Iterator[Row]:
    """Yield what is measured on a network."""
    for name in COUNTS:
        for work, loader, threads in (
            *(("reading", loader, 1) for loader in LOADERS),
            ("reading", "no workers", 8),
            ("training", "no workers", 1),
            ("training", "2 forked, persistent", 1),
        ):
            about = {"network": network, "set": name, "work": work}
            yield {**about, "loader": loader, "threads": threads}


def main() -> None:
    arguments = options(__doc__, "data", network={"required": True}, output=NEEDED)
    with gloo() as rank:
        last = dist.get_world_size() - 1
        readers = dist.new_group([*range(last)])
        host = gathered(f"node{os.environ['NODE_RANK']}")[last]
        if rank == last:
            with store(arguments.data):
                dist.barrier()
                dist.barrier()
            return
        dist.barrier()
        given, meet = link(host), partial(dist.barrier, readers)
        with tempfile.TemporaryDirectory() as folder:

            def work(**job: Any) -> Row:
                return {**measured(host, Path(folder) / "samples", readers, **job), **given}

            run_here(arguments.output, work, jobs(arguments.network), rank, meet)
        dist.barrier()


if __name__ == "__main__":
    main()
