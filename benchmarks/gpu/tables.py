"""The tables of docs/how-to/gpu.md: measured, and computed from bytes and passes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.pages.tables import table
from benchmarks.record import recorded
from sparcel.core.comm import ring_bytes
from sparcel.core.cost import Problem, count
from sparcel.core.cost.steps import by_regions
from sparcel.core.formats import format_named
from sparcel.core.kernels import Regions
from sparcel.core.regions import leg

BEFORE = "958b5150"
"""The commit of which `counts` keeps the rows: the last one before the three passes."""
CARD = "gpu_nvidia_h100_80gb_hbm3"
RANKS, GBITS = 8, (10, 25, 100)
"""What the computed table is for."""
TRAVELS = {"default": ((1.0, 1.0), "packed:5"), "10 %": ((0.1, 0.3), "packed:4")}
"""How much of a vector goes up, and comes down, and how."""
WIDTH, LAYERS, LOW_RANK = 2048, 6, 4
"""The MLP that `measure` trains, and the rank of PowerSGD."""
SIZE = LAYERS * WIDTH * (WIDTH + 1)

METHODS = {
    "DDP": "DDP",
    "DDP bf16": "DDP, bfloat16",
    "PowerSGD 4": "PowerSGD, rank 4",
    "sparcel": "sparcel, 10 %",
    "topk 1 %": "`topk`, 1 %",
}
"""What the record of the card calls methods, and what the page does."""

COPY_MS = 0.051
PASSES_MS = {"default": 0.122, "10 %": 0.340}
"""Of 25 million coordinates on an H200, by prototypes that are not sparcel's code, 2026-11-27; all
in 4 bits."""


def measured() -> Iterator[str]:
    """Yield the table of steps on a card that processes share."""
    steps = recorded(CARD)["steps"]
    cells = []
    for method, name in METHODS.items():
        rows = [row for row in steps if row["method"] == method]
        times = (f"{row['step_ms']:.0f}" for row in rows)
        sent = rows[-1]["sent_bytes"] / 1e6
        digits = 0 if sent > 10 else 1
        cells.append([name, *times, f"{sent:.{digits}f}", f"{8 * sent:.0f} ms"])
    return table(("", "1 process", "2", "4", "MB sent", "plus, at 1 Gbit/s"), cells)


class Choice(NamedTuple):
    """A method, the bytes that a rank sends, and what its passes take on the card."""

    name: str
    nbytes: float
    passes_ms: float

    def ms(self, gbits: float) -> float:
        """Return what the exchange takes at least, on links of so many Gbit/s."""
        return self.passes_ms + 8e-6 * self.nbytes / gbits


def choices() -> list[Choice]:
    """Return the methods for the MLP, whose biases count as weights."""
    low_rank = LAYERS * (2 * WIDTH * LOW_RANK + WIDTH)
    return [
        Choice("DDP", ring_bytes(4 * SIZE, RANKS), 0.0),
        # Two conversions, of 6 bytes a coordinate each, where a copy has 8.
        Choice("DDP, bfloat16", ring_bytes(2 * SIZE, RANKS), 1.5 * COPY_MS),
        Choice("PowerSGD, rank 4", ring_bytes(4 * low_rank, RANKS), powersgd_ms()),
        *(Choice(name, bytes_by_regions(*TRAVELS[name]), ms) for name, ms in PASSES_MS.items()),
    ]


def powersgd_ms() -> float:
    """Return by how much PowerSGD's step took longer than DDP's in one process on the H100."""
    ms = {row["method"]: row["step_ms"] for row in recorded(CARD)["steps"] if row["ranks"] == 1}
    return float(ms["PowerSGD 4"] - ms["DDP"])


def bytes_by_regions(shares: tuple[float, float], format: str) -> float:
    """Return the bytes that a rank sends where these shares travel by regions."""
    up, down = shares
    problem = Problem(SIZE, round(up * SIZE), RANKS, format=format_named(format))
    return count(partial(by_regions, returned=round(down * SIZE)), problem).bytes_sent


def computed() -> Iterator[str]:
    """Yield the table of what an exchange takes at least."""
    cells = (
        (
            *(one.name, f"{one.nbytes / 1e6:.1f}", f"{one.passes_ms:.2f}"),
            *(f"{one.ms(gbits):.3g}" for gbits in GBITS),
        )
        for one in choices()
    )
    return table(("", "MB sent", "passes", *(f"{gbits} Gbit/s" for gbits in GBITS)), cells)


def room() -> dict[str, float]:
    """Return how much memory the messages of a bucket take, in bytes a coordinate."""
    regions, found = Regions.of(SIZE, RANKS), {}
    for name, (shares, format) in TRAVELS.items():
        up, down = (
            leg(regions, ((SIZE, one),), format_named(format), torch.float32) for one in shares
        )
        # What goes up and what arrives, each with the own part's place, and what comes down.
        found[name] = RANKS * (2 * max(up.bounds) + max(down.bounds)) / SIZE
    return found


def all_tables() -> Iterator[str]:
    """Yield the lines of all tables."""
    for lines in (measured, computed):
        yield from lines()
