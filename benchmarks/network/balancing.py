"""What balanced regions and evened blocks are worth: Ok-Topk's Figure 7, on simulated clusters.

    python -m benchmarks.network.balancing --output benchmarks/results/balancing.json

Each rank selects 1 % of what memory holds: the sum of a few gradients of a language model, whose
words occur by Zipf's law. Regions are ``equal``, ``averaged`` over the ranks as in the paper, or
``counted`` as in `sparcel`. Blocks of winners are gathered ``direct``, or ``evened`` out first. All
ways have the same winners. Bytes are those of the worst rank in each phase, headers included, and
milliseconds those of messages alone, at 1 Gbit/s and 50 µs a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparcel
from benchmarks.network.scale import ETHERNET
from benchmarks.record import options, report
from benchmarks.training.models import Words
from sparcel import SparseStream
from sparcel.core import patterns
from sparcel.core.collectives.all_reduce import reduce_regions
from sparcel.core.collectives.counting import average_boundaries, balanced_boundaries, global_topk
from sparcel.core.collectives.oktopk import gather_winners
from sparcel.core.comm import Communicator
from sparcel.core.wire import Wire

WORDS, LENGTH, BATCHES = 50_000, 32, 4
DENSITY = 0.01

Bounds = Callable[[SparseStream, Communicator], list[int]]

REGIONS: dict[str, Bounds] = {
    "equal": lambda own, comm: patterns.cuts(own.size, comm.size),
    "averaged": average_boundaries,
    "counted": lambda own, comm: balanced_boundaries(own, comm, None)[0],
}
BLOCKS = {"direct": False, "evened": True}


class Run:
    """A sum of the ranks' streams by one way, up to the end of a phase."""

    def __init__(self, own: Sequence[SparseStream], k: int, regions: str, phase: str) -> None:
        self.own, self.k, self.regions, self.phase = own, k, regions, phase
        report = sparcel.simulate(len(own), self._on_rank)
        self.ms = 1e3 * report.seconds_on(ETHERNET)
        self.traffic = [(one.bytes_sent, one.bytes_received) for one in report.traffic]
        self.results = set(report.results)

    def _on_rank(self, comm: Communicator) -> tuple[int, float] | None:
        wire, own = Wire(comm), self.own[comm.rank]
        boundaries = REGIONS[self.regions](own, comm)
        region = reduce_regions(own, boundaries, wire)
        if self.phase == "reduced":
            return None
        winners = global_topk(region.values, comm, self.k, own.size, region.finite)
        if self.phase == "selected":
            return None
        total = gather_winners(region, winners.counts, boundaries, wire, BLOCKS[self.phase]).total
        return total.nnz, float(total.values.double().sum())

    def after(self, other: Run | None = None) -> dict[str, float]:
        """Return what this run took beyond another one that ends earlier."""
        before = other.traffic if other else [(0, 0)] * len(self.traffic)
        ends = zip(self.traffic, before, strict=True)
        worst = max(b - a for end, start in ends for b, a in zip(end, start, strict=True))
        return {"ms": self.ms - (other.ms if other else 0.0), "bytes": worst}


def accumulated(rank: int) -> Tensor:
    """Return the sum of a rank's gradients at a few batches, ``[size]``."""
    torch.manual_seed(0)
    model = Words(WORDS, LENGTH)
    often = 1 / torch.arange(1, WORDS + 1)  # Zipf's law
    draws = torch.Generator().manual_seed(1 + rank)
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    for _ in range(BATCHES):
        text = torch.multinomial(often, 4 * (LENGTH + 1), True, generator=draws).view(4, -1)
        logits = model(text[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, text[:, 1:].flatten())
        found = torch.autograd.grad(loss, list(model.parameters()))
        total += torch.cat([gradient.flatten() for gradient in found])
    return total


def measured(own: Sequence[SparseStream], k: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to sum these ranks' streams."""
    totals = set()
    for regions in REGIONS:
        reduced, selected = (Run(own, k, regions, phase) for phase in ("reduced", "selected"))
        row = {f"reduce_{name}": value for name, value in reduced.after().items()}
        for blocks in BLOCKS:
            gathered = Run(own, k, regions, blocks)
            totals |= gathered.results
            gather = {f"gather_{name}": v for name, v in gathered.after(selected).items()}
            yield {"ranks": len(own), "regions": regions, "blocks": blocks, **row, **gather}
    if len(totals) > 1:
        raise SystemExit(f"ranks or ways disagree: {totals}")


def main() -> None:
    """Measure all rows, and write them."""
    told = options(__doc__, ranks=[8, 16, 32], output=Path)
    torch.set_num_threads(1)
    vectors = map(accumulated, range(max(told.ranks)))
    own = [sparcel.topk(one, int(DENSITY * one.numel())) for one in vectors]
    rows = [row for ranks in told.ranks for row in measured(own[:ranks], own[0].nnz)]
    report(told.output, rows, size=own[0].size, k=own[0].nnz)


if __name__ == "__main__":
    main()
