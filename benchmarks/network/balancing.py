"""What balanced regions and evened blocks are worth in Ok-Topk: its Figure 7.

Run it in each rank of an emulated cluster:

    sparcel lab run --nodes 8 --rate 1gbit -- python -m benchmarks.network.balancing \
        --output benchmarks/results/balancing.json

Each rank selects 1 % of its gradient of a language model of words, with memory: the sum of a few
gradients. Regions are ``equal``, ``averaged`` over the ranks as in the paper, or ``counted`` as in
`sparcel`. Blocks of winners are gathered ``direct`` or ``evened`` out first. All rows take turns
and are exact. ``ms`` is the median over the turns of the slowest rank's time; ``kb`` is what the
busiest rank sends or receives.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import sparcel
from benchmarks.machine import machine
from benchmarks.training.models import Words
from sparcel import patterns
from sparcel.collectives._global_topk import global_topk
from sparcel.collectives.oktopk import gather_winners
from sparcel.collectives.reduce_scatter import reduce_regions
from sparcel.collectives.regions import average_boundaries, balanced_boundaries
from sparcel.comm import Traffic, resolve
from sparcel.stream import SparseStream
from sparcel.wire import Wire

Bounds = Callable[[SparseStream, Wire], list[int]]

REGIONS: dict[str, Bounds] = {
    "equal": lambda own, wire: patterns.regions(own.size, wire.size),
    "averaged": lambda own, wire: average_boundaries(own, wire.comm),
    "counted": lambda own, wire: balanced_boundaries(own, wire.comm, None)[0],
}
BLOCKS = {"direct": False, "evened": True}
WARM_UP = 2


def oktopk(own: SparseStream, wire: Wire, k: int, regions: str, blocks: str) -> SparseStream:
    """Sum over all ranks and keep the k largest, as `sparcel.collectives.oktopk` by regions."""
    boundaries = REGIONS[regions](own, wire)
    region = reduce_regions(own, boundaries, wire)
    winners = global_topk(region.values, wire.comm, k, own.size, region.finite)
    return gather_winners(region, winners.counts, boundaries, wire, BLOCKS[blocks]).total


def accumulated(rank: int, words: int, steps: int, length: int = 32) -> Tensor:
    """Return the sum of a rank's gradients at ``steps`` batches, ``[size]``."""
    torch.manual_seed(0)
    model = Words(words, length)
    often = 1 / torch.arange(1, words + 1)  # Zipf's law
    draws = torch.Generator().manual_seed(1 + rank)
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    for _ in range(steps):
        text = torch.multinomial(often, 4 * (length + 1), True, generator=draws).view(4, -1)
        logits = model(text[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, text[:, 1:].flatten())
        found = torch.autograd.grad(loss, list(model.parameters()))
        total += torch.cat([gradient.flatten() for gradient in found])
    return total


def measured(own: SparseStream, wire: Wire, k: int, turns: int) -> dict[str, dict[str, float]]:
    """Let all rows take turns; all ranks call."""
    names = list(product(REGIONS, BLOCKS))
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    volumes: dict[tuple[str, str], int] = {}
    first = None
    for turn in range(WARM_UP + turns):
        for name in names:
            dist.barrier()
            before, start = replace(wire.comm.traffic), perf_counter()
            total = wire.comm.run(partial(oktopk, own, wire, k, *name))
            took = perf_counter() - start
            first = first or total
            assert total.indices is not None and first.indices is not None
            assert torch.equal(total.indices, first.indices), "rows differ"
            assert torch.equal(total.values, first.values), "rows differ"
            if turn >= WARM_UP:
                seconds[name].append(took)
            volumes[name] = _volume_since(before, wire.comm.traffic)
    rows = {}
    for name in names:
        mine = torch.tensor([*seconds[name], volumes[name]], dtype=torch.float64)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        *slowest, volume = mine.tolist()
        rows[", ".join(name)] = {"ms": 1e3 * median(slowest), "kb": volume / 1e3}
    return rows


def _volume_since(before: Traffic, now: Traffic) -> int:
    sent, received = (
        getattr(now, what) - getattr(before, what) for what in ("bytes_sent", "bytes_received")
    )
    return max(sent, received)


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """Return the rows as a table to print."""
    shown = Table("regions, blocks", "ms", "kB")
    for name, row in rows.items():
        shown.add_row(name, f"{row['ms']:.1f}", f"{row['kb']:.0f}")
    return shown


def main() -> None:
    """Measure all rows, and write them from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--words", type=int, default=50_000, help="words of the vocabulary")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=4, help="gradients that are summed")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    vector = accumulated(dist.get_rank(), arguments.words, arguments.steps)
    k = int(arguments.density * vector.numel())
    comm = resolve(None)
    rows = measured(sparcel.topk(vector, k), Wire(comm), k, arguments.turns)
    if dist.get_rank() == 0:
        Console(width=120).print(table(rows))
        if arguments.output is not None:
            settings = {"ranks": dist.get_world_size(), "size": vector.numel(), "k": k}
            report = {**machine(), "settings": settings, "rows": rows}
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
