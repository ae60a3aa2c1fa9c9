"""How much larger memory becomes where `sparcml` rounds, beside memory without rounding.

    python -m benchmarks.streams.rounding

Normal gradients of 16,384 coordinates on 8 simulated ranks. A row has the norm of rank 0's memory,
over that without rounding, after every 50 steps.
"""

from __future__ import annotations

from itertools import product

import torch

import sparcel
from benchmarks.record import RESULTS, Row, report, rule_of
from sparcel.core.comm import Communicator

RANKS, SIZE, STEPS, EVERY = 8, 1 << 14, 200, 50
DENSITIES, BITS = (0.03, 0.25), (8, 4, 2)


def norms(scheme: str, settings: Row) -> list[float]:
    """Return the norms of rank 0's memory."""
    made = sparcel.scheme(scheme, **settings)

    def on_rank(comm: Communicator) -> list[float]:
        own, found = made.fresh(), []
        draws = torch.Generator().manual_seed(comm.rank)
        for step in range(1, STEPS + 1):
            own.step(torch.randn(SIZE, generator=draws), comm)
            if step % EVERY == 0:
                assert own.memory is not None
                found.append(float(own.memory.norm()))
        return found

    return sparcel.simulate(RANKS, on_rank).results[0]


def main() -> None:
    rows: list[Row] = []
    for density, bits in product(DENSITIES, BITS):
        settings = {"density": density, "bits": bits}
        rounded, plain = (norms("sparcml", one) for one in (settings, {"density": density}))
        grown = [round(a / b, 3) for a, b in zip(rounded, plain, strict=True)]
        rule = rule_of("sparcml", settings)
        rows.append({"scheme": "sparcml", "settings": settings, "rule": rule, "grown": grown})
    report(RESULTS / "rounding.json", rows, steps=STEPS)


if __name__ == "__main__":
    main()
