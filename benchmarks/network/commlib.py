"""CommLib end to end: images of growing resolution on two nodes of four ranks, part by part.

    python -m benchmarks.network.commlib IMAGES --folder SCRATCH \
        --output benchmarks/results/commlib.json

``IMAGES`` holds train.tar.xz and test.tar.xz, files CLASS/NAME.jpg in each. They are unpacked to
``SCRATCH``, and `benchmarks.server` serves a sample of them, on a third node, whose link is like
the others'. Jobs that the output has are not repeated, so the benchmark can be run in pieces:
``--only`` takes the jobs whose kind and label, as in "training: DDP", contain a text.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.record import NEEDED, Row, options, run_here, tell
from sparcel.tools.lab import EmulatedNetwork, Link, Workers, parse_rate

Phase = tuple[int, int, int]

NODES, RANKS_PER_NODE, PORT = 2, 4, 8000
SAMPLES = {"train": 12288, "test": 2000}
PARTS = ("reading", "computing", "selecting", "communicating", "LARS")
"""Of a step's time, see `commlib_rank`."""

PEAK = 5.0
"""The highest learning rate; it rises to there in the first tenth, and falls to 0."""
PHASES = ((13, 12, 64), (11, 16, 64), (3, 28, 64), (1, 32, 32))
"""Epochs, resolution and batch of a rank, as in CommLib's section 5.6, its resolutions divided by 8
and its batches by 4; but for the last resolution, which is that of the images."""

TORUS: Row = {"scheme": "torus2d", "settings": {}}
MSTOPK: Row = {"scheme": "hitopk", "settings": {"density": 0.01, "selector": "mstopk"}}
TOPK: Row = {"scheme": "topk", "settings": {"density": 0.01}}
SPARSE_FIRST = (MSTOPK, TORUS, TORUS, TORUS)


def job(
    kind: str,
    label: str,
    exchange: str = "sparcel",
    schemes: tuple[Row, ...] = (TORUS,) * 4,
    cached: bool = True,
    parallel: bool = True,
    seed: int = 0,
    phases: tuple[Phase, ...] = PHASES,
) -> Row:
    """Return what `commlib_rank.py` is told; ``exchange`` is ``"none"``, ``"DDP"`` or ours.

    ``answers`` is how the store sends a header and its file. Recorded rows of a store that sent
    them "in two writes" are measured anew.
    """
    return {
        "kind": kind,
        "label": label,
        "exchange": exchange,
        "cached": cached,
        "parallel": parallel,
        "answers": "in one write",
        "seed": seed,
        "phases": list(_phases(phases, schemes)),
    }


def _phases(phases: tuple[Phase, ...], schemes: tuple[Row, ...]) -> Iterator[Row]:
    """Yield the phases, of which the first begins with a tenth of the training as warm-up."""
    whole, batch = sum(length for length, _, _ in phases), phases[0][2]
    rising, at = whole / 10, 0.0
    for place, ((length, resolution, size), scheme) in enumerate(zip(phases, schemes, strict=True)):
        settings = {"resolution": resolution, "batch_size": size, **scheme}
        lengths = (rising, length - rising) if place == 0 else (length,)
        for part in lengths:
            ends = (at, at + part)
            rates = [
                PEAK * size / batch * min(one / rising, (whole - one) / (whole - rising))
                for one in ends
            ]
            yield {"length": part, "lr": rates, **settings}
            at += part


def jobs() -> Iterator[Row]:
    """Yield all jobs."""
    none = {"cached": False, "parallel": False}
    yield job("training", "DDP", "DDP", **none)
    yield job("training", "DDP, DataCache", "DDP", parallel=False)
    yield job("training", "DDP, parallel LARS", "DDP", cached=False)
    yield job("training", "2D torus", **none)
    yield job("training", "sparse first", schemes=SPARSE_FIRST, **none)
    yield job("training", "all three", schemes=SPARSE_FIRST)
    yield job("training", "all three, but dense throughout")
    yield job("training", "all three, but sparse throughout", schemes=(MSTOPK,) * 4)
    # Rates are those of a second epoch, whose images the cache has.
    twice = tuple((2, *rest) for _, *rest in PHASES)
    yield job("existing", "Dense-SGD", "DDP", phases=twice, **none)
    yield job("existing", "TopK-SGD", schemes=(TOPK,) * 4, phases=twice, **none)
    yield job("throughput", "alone", "none", parallel=False, phases=twice)
    yield job("throughput", "Dense-SGD", "DDP", phases=twice)
    yield job("throughput", "2DTAR-SGD", phases=twice)
    yield job("throughput", "MSTopK-SGD", schemes=(MSTOPK,) * 4, phases=twice)
    names = {"2DTAR-SGD": TORUS, "TopK-SGD": TOPK, "MSTopK-SGD": MSTOPK}
    for seed in range(2):
        for name, scheme in names.items():
            whole = ((40, 16, 128),)
            yield job("convergence", name, schemes=(scheme,), seed=seed, phases=whole)


def unpack(archives: Path, images: Path) -> None:
    """Unpack the archives unless that is done, and list a sample of each, always the same."""
    for split, count in SAMPLES.items():
        folder = images / split
        if (folder / "files.txt").exists():
            continue
        names = []
        with tarfile.open(archives / f"{split}.tar.xz") as archive:
            for member in archive:  # in the file's order: going back unpacks all anew
                content = archive.extractfile(member)
                if content is not None:
                    names.append("/".join(member.name.split("/")[-2:]))
                    (folder / names[-1]).parent.mkdir(parents=True, exist_ok=True)
                    (folder / names[-1]).write_bytes(content.read())
        names = Random(0).sample(sorted(names), count)
        (folder / "files.txt").write_text("\n".join(names) + "\n")


def run(folder: Path, rate: str, **one: Any) -> Row:
    """Run a job in the lab, and return its row."""
    images, cache = folder / "images", folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    with EmulatedNetwork(NODES + 1, Link(parse_rate(rate))) as network:
        serve = [sys.executable, "-m", "benchmarks.server", str(PORT), str(images)]
        store = subprocess.Popen(
            network.command(NODES, serve), pass_fds=network.descriptors, stdout=subprocess.PIPE
        )
        told = {
            **one,
            "images": str(images),
            "cache": str(cache),
            "store": f"http://{network.address(NODES)}:{PORT}",
        }
        assert store.stdout is not None
        store.stdout.readline()  # it serves
        network.nodes = NODES  # the ranks' nodes; the store has the last one for itself
        argv = [sys.executable, "-m", "benchmarks.network.commlib_rank", json.dumps(told)]
        epochs: list[Row] = []
        try:
            with Workers(network, argv, ranks_per_node=RANKS_PER_NODE) as workers:
                for _, line in workers.lines():
                    epochs.append(json.loads(line))
                    tell({"label": one["label"], **epochs[-1]})
        finally:
            store.kill()
            store.wait()
    return {"rate": rate, "ranks": NODES * RANKS_PER_NODE, "epochs": epochs}


def main() -> None:
    """Run the jobs that the output lacks."""
    arguments = options(__doc__, "images", folder=NEEDED, rate="250mbit", only="", output=NEEDED)
    unpack(arguments.images, arguments.folder / "images")
    wanted = (one for one in jobs() if arguments.only in f"{one['kind']}: {one['label']}")
    run_here(arguments.output, partial(run, arguments.folder, arguments.rate), wanted)


if __name__ == "__main__":
    main()
