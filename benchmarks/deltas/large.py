"""A model of 7 B parameters in bfloat16, of which a step changes 1 %: published and applied here.

    python -m benchmarks.deltas.large FOLDER

The shapes are those of Llama 2 7B, values are normal, and each is moved by as much as makes one in
a hundred round to another. One process publishes, and notes a byte of each weight (``bracketed``);
then another one reads the whole model and applies the delta. Memory must hold one and a half
models, and ``FOLDER`` one.
``cpu_s`` is processor time, ``peak`` the bytes of memory of its own (not of files) at most, beside
the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, process_time

import torch
from torch import Tensor

from benchmarks.clock import process_bytes
from benchmarks.record import RESULTS, Row, machine, options, show, write
from sparcel.products import delta

LAYERS, WIDTH, INNER, WORDS = 32, 4096, 11008, 32000
SCALE, MOVED = 0.02, 6e-7
"""Of the weights, and of what moves them, which was tried so that 1 % change."""


def weights() -> dict[str, Tensor]:
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


def step(model: dict[str, Tensor]) -> None:
    """Move all weights."""
    for tensor in model.values():
        tensor.copy_(tensor.float().add_(torch.randn(tensor.shape).sign_(), alpha=MOVED))


def measured(what: str, work: Callable[[], delta.Version]) -> Row:
    """Return what some work takes; its memory is looked at a hundred times a second."""
    ended, before, peak = Event(), process_bytes("RssAnon"), 0

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            peak = max(peak, process_bytes("RssAnon"))

    thread = Thread(target=watch)
    thread.start()
    start, busy = perf_counter(), process_time()
    version = work()
    row = {"what": what, "seconds": perf_counter() - start, "cpu_s": process_time() - busy}
    ended.set()
    thread.join()
    return {**row, "peak": peak - before, "version": str(version)}


def publishing(folder: Path) -> list[Row]:
    """Publish the model, and a step."""
    model = weights()
    publisher = delta.Publisher(folder / "store", bracketed=True)
    rows = [measured("publish the whole model", lambda: publisher.publish(model))]
    step(model)
    rows.append(measured("publish a step", lambda: publisher.publish(model)))
    return rows


def serving(folder: Path) -> list[Row]:
    """Read the model, and a step."""
    subscriber = delta.Subscriber(folder / "store")

    def update(to: int) -> delta.Version:
        done = subscriber.update(to)
        assert done is not None
        return done.version

    rows = [measured("read the whole model", lambda: update(0))]
    rows.append(measured("read, check and apply a step", lambda: update(1)))
    subscriber.verify()
    return rows


def main() -> None:
    given = options(__doc__, "folder", output=RESULTS / "deltas_large.json")
    origin = machine(FOLDER=given.folder)
    rows = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for side in (publishing, serving):
            rows += pool.submit(side, given.folder).result()
    entries = delta.read_index(given.folder / "store").entries
    (step_told,) = (entry for entry in entries if entry.kind == "delta")
    told = {name: getattr(step_told, name) for name in ("elements", "changed", "bytes")}
    write(given.output, {**origin, **told}, rows)
    show(rows)
    print(told)


if __name__ == "__main__":
    main()
