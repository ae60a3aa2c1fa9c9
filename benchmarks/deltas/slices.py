"""A server of an eighth of a model: what it reads, and what that takes.

    python -m benchmarks.deltas.slices FOLDER PLACE

``FOLDER`` has weights of real fine-tuning, or gets them from `pairs.py`; they are repeated till
there are 250 million. In ``PLACE``, an empty folder, they are published: as by default, in chunks
that are apart, and so with the code ``steps``. Readers, each a process of its own, have all
tensors, some of them, which are about an eighth of the elements, or an eighth of the rows of each.
``whole_s`` is the first version and ``changed_s`` the median of the next ones, on one thread;
``beside`` the most memory that these take beside the weights.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.clock import process_bytes, resident
from benchmarks.deltas.pairs import pairs, tiled
from benchmarks.record import RESULTS, Row, machine, options, show, write
from sparcel.products import delta

LR = 1e-6
ELEMENTS = 250_000_000
VERSIONS = 4
PART = 8
PUBLISHERS: dict[str, dict[str, Any]] = {
    "default": {},
    "apart": {"apart": True},
    "apart, steps": {"apart": True, "code": "steps"},
}
READERS = {"default": ["all"], "apart": ["all", "names"], "apart, steps": ["all", "names", "rows"]}
"""Which readers each publisher has."""


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
    reader, took, sizes = delta.Subscriber(store, only=only), [], []
    for number in range(VERSIONS):
        before = resident()
        start = perf_counter()
        update = reader.update(number)
        took.append(perf_counter() - start)
        assert update is not None
        sizes.append(update.bytes)
    reader.verify()
    return {
        "elements": sum(tensor.numel() for tensor in reader.tensors.values()),
        "whole_bytes": sizes[0],
        "whole_s": took[0],
        "changed_bytes": median(sizes[1:]),
        "changed_s": median(took[1:]),
        "beside": process_bytes("VmHWM") - before,
    }


def main() -> None:
    given = options(__doc__, "folder", "place", output=RESULTS / "deltas_slices.json")
    origin = machine(FOLDER=given.folder, PLACE=given.place)
    files = pairs(given.folder, [LR], VERSIONS)[LR]
    rows = []
    for name, settings in PUBLISHERS.items():
        store = given.place / name.replace(", ", "-")
        publisher = delta.Publisher(store, **settings)
        for file in files:
            weights = tiled(file, ELEMENTS)
            publisher.publish(weights)
        for reader in READERS[name]:
            only = asked_of(reader, {key: one.shape for key, one in weights.items()})
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                told = pool.submit(read, store, only).result()
            rows.append({"publisher": name, "reader": reader, **told})
    write(given.output, origin, rows)
    show(rows)


if __name__ == "__main__":
    main()
