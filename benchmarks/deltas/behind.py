"""How long a reader takes that is many versions behind, from a folder and from an object store.

    python -m benchmarks.deltas.behind FOLDER PLACE...

``FOLDER`` has consecutive weights of real fine-tuning, or gets them from `pairs.py`. In each PLACE,
a path or URL in which nothing is, they are published, with a whole model each 50 versions. Readers
that have the first version then go to the last one, and to the one before, to which no merged delta
leads. ``seconds`` are the medians of several readers; ``network`` those of reading the same files
alone, one after the other. Everything runs in one thread but reading ahead.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from benchmarks.deltas.pairs import pairs
from benchmarks.record import RESULTS, Row, machine, options, show, write
from sparcel.products import delta
from sparcel.products.delta.index import INDEX
from sparcel.products.stores import read_at_most

LR = 1e-6
VERSIONS = 51
READERS = 9


def published(place: str, files: list[Path]) -> delta.Store:
    """Publish all versions, and return the store."""
    store = delta.store_at(place)
    if delta.read_index(store).newest is None:
        publisher = delta.Publisher(store, anchor_every=VERSIONS - 1, lag=VERSIONS)
        for file in files:
            publisher.publish(load_file(file))
    return store


def behind(store: delta.Store, to: int) -> Row:
    """Return the row of readers that go from the first version to another one."""
    seconds, network, names = [], [], list[str]()
    for _ in range(READERS):
        reader = delta.Subscriber(store)
        reader.update(0)
        with patch("sparcel.products.delta.kept.read_at_most", wraps=read_at_most) as reads:
            start = perf_counter()
            update = reader.update(to)
            seconds.append(perf_counter() - start)
        reader.verify()
        names = [call.args[1] for call in reads.call_args_list]
        start = perf_counter()
        for name in [INDEX, *names]:
            store.read(name)
        network.append(perf_counter() - start)
        assert update is not None
    return {
        "store": type(store).__name__,
        "versions": to,
        "files": len(names),
        "bytes": update.bytes,
        "seconds": median(seconds),
        "network": median(network),
    }


def main() -> None:
    given = options(__doc__, "folder", "places", output=RESULTS / "deltas_behind.json")
    torch.set_num_threads(1)
    places = {f"PLACE{number}": Path(one) for number, one in enumerate(given.places, 1)}
    origin = machine(FOLDER=given.folder, **places)
    files = pairs(given.folder, [LR], VERSIONS)[LR]
    rows = [
        behind(published(place, files), to)
        for place in given.places
        for to in (VERSIONS - 1, VERSIONS - 2)
    ]
    write(given.output, origin, rows)
    show(rows)


if __name__ == "__main__":
    main()
