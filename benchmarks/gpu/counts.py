"""What a step gives a GPU to do, and how often the host waits for it: counted without a GPU.

    python -m benchmarks.gpu.counts [--json PATH]

The device of `tests.card` takes the GPU's place and Triton's interpreter runs the kernels, so
these are numbers of kernels and copies, and no times. Layers are narrower than those of
`measure`, and samples smaller by as much, so that buckets take the paths of long vectors. NCCL's
engine has Gloo below it. It writes a record to benchmarks/results, or to ``--json``; this keeps the
rows of the code before the passes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

from torch import Tensor

import sparcel
from benchmarks.gpu.tables import BEFORE
from benchmarks.record import RESULTS, Row, machine, options, rows_of, show, write
from sparcel.core.comm import Communicator
from sparcel.core.schemes import SPARSER, Scheme
from sparcel.core.training import Averager
from tests import nccl
from tests.card import Launches, launches, moved, on_card
from tests.workers import Pool

RANKS, WIDTH = 4, 96
SAMPLES = 512
"""A vector is long where it has more than 16 times as many coordinates."""
BUCKETS = ((5,), (4, 3), (2, 1), (0,))
"""The layers in each of the vectors that DDP makes of `measure`'s MLP of six layers."""
STEPS = 2
"""The last one is counted: what is made once has been made then."""

SCHEMES: dict[str, Callable[[], Scheme]] = {
    "default": sparcel.scheme,
    "10 %": partial(sparcel.scheme, **SPARSER),
    "topk 1 %": partial(sparcel.scheme, "topk", density=0.01),
}
CARRIERS = ("host", "nccl")
RECORD = RESULTS / "gpu_counts.json"


def row(comm: Communicator, width: int, method: str, carrier: str) -> Row:
    """Return the counts of a method; all ranks call."""
    import_module("sparcel.core.kernels.gpu.select").SAMPLES = SAMPLES
    counts = counted(comm, width, SCHEMES[method](), carrier)
    return {"method": method, "carrier": carrier, **counts}


def counted(comm: Communicator, width: int, scheme: Scheme, carrier: str) -> Row:
    """Return what the most demanding bucket of a step is, and what the step is with its end."""
    layers = [{f"{layer}.weight": (width, width), f"{layer}.bias": (width,)} for layer in range(6)]
    shapes = {name: shape for layer in layers for name, shape in layer.items()}
    with reached(comm, carrier) as group:
        tensors = {name: moved(torch.zeros(shape)) for name, shape in shapes.items()}
        averager = Averager(tensors, scheme, group=group, carrier=carrier, frontload=False)
        for step in range(STEPS):
            draws = torch.Generator().manual_seed(100 * step + comm.rank)
            buckets = []
            for which in BUCKETS:
                vector, places = bucket([layers[layer] for layer in which], draws)
                with launches(everywhere=True) as done:
                    averager.queue(vector, places).wait()
                buckets.append(numbers_of(done))
            with launches(everywhere=True) as done:
                averager.finish()
        averager.handle.close()
    end = numbers_of(done)
    most = max(buckets, key=lambda one: (one["triton"] + one["torch"], one["waits"]))
    return {"bucket": most, "end": end, "step": total([*buckets, end])}


@contextmanager
def reached(comm: Communicator, carrier: str) -> Iterator[Communicator | None]:
    """Make the card; give the group of the ranks, or their communicator over NCCL's engine."""
    if carrier == "nccl":
        with nccl.connected(comm) as far:
            yield far
    else:
        with on_card():
            yield None


def bucket(
    layers: list[dict[str, tuple[int, ...]]], draws: torch.Generator
) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    """Return the gradients of layers end to end on the card, and where each tensor lies."""
    places, size = {}, 0
    for layer in layers:
        for name, shape in layer.items():
            places[name] = (size, size + torch.Size(shape).numel())
            size = places[name][1]
    return moved(torch.randn(size, generator=draws)), places


def numbers_of(done: Launches) -> dict[str, int]:
    """Return how many kernels of Triton's and of torch's, copies, and waits there were."""
    return {
        "triton": len(done.triton),
        "torch": len(done.torch),
        "copies": len(done.copies),
        "waits": done.copies.count("read"),
    }


def total(parts: list[dict[str, int]]) -> dict[str, int]:
    return {key: sum(one[key] for one in parts) for key in parts[0]}


def everywhere(
    ranks: int, width: int, methods: Iterable[str], carriers: Iterable[str]
) -> list[Row]:
    """Return the first rank's counts of methods by carriers."""
    from benchmarks.gpu import counts  # as the processes of the ranks import it

    pool = Pool()
    runs = [(width, method, carrier) for carrier in carriers for method in methods]
    found = [pool.run_on(ranks, counts.row, *run)[0] for run in runs]
    pool.kill()
    return found


def main() -> None:
    path, origin = options(__doc__, json=RECORD).json, machine()
    about = {key: origin[key] for key in ("commit", "date")} | {"ranks": RANKS, "width": WIDTH}
    found = [about | one for one in everywhere(RANKS, WIDTH, SCHEMES, CARRIERS)]
    before = [one for one in rows_of(RECORD) if one["commit"] == BEFORE]
    write(path, origin, before + found)
    show({key: one[key] for key in ("method", "carrier")} | one["step"] for one in found)


if __name__ == "__main__":
    main()
