"""What crosses between the nodes in a step of figure 7's methods, on clusters of any size.

Counted on the simulated cluster, for float16 gradients and a density of 1 %. Run it as

    python -m benchmarks.network.two_tiers_bytes --output benchmarks/results/two_tiers_bytes.json
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.network.tree import tree_all_reduce
from benchmarks.network.two_tiers import METHODS
from benchmarks.record import NEEDED, Row, machine, options, show, write
from sparcel import scheme, simulate
from sparcel.core.comm import Communicator

GRIDS = [(2, 4), (2, 8), (4, 8), (16, 8)]
SIZE = 1 << 18
DENSITY = 0.01


def step(name: str, gradient: Tensor, comm: Communicator, here: int) -> None:
    """Do a step of a method."""
    if name == "TreeAR":
        tree_all_reduce(gradient, comm)
    elif name == "engine":
        comm.all_reduce(gradient)
    else:
        made = {
            "NaiveAG": lambda: scheme("mstopk", density=DENSITY),
            "2DTAR": lambda: scheme("torus2d", wire="float16", ranks_per_node=here),
            "HiTopKComm": lambda: scheme("hitopk", density=DENSITY, ranks_per_node=here),
        }
        made[name]().step(gradient, comm)


def count(name: str, nodes: int, here: int) -> Row:
    """Return the bytes of the busiest node, in the busier direction, for each coordinate."""

    def on_rank(comm: Communicator) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        step(name, torch.randn(SIZE, generator=generator).half(), comm, here)

    report = simulate(nodes * here, on_rank, ranks_per_node=here)
    busiest = max(
        sum(getattr(traffic, way) for traffic in report.between_nodes[start : start + here])
        for start in range(0, nodes * here, here)
        for way in ("bytes_sent", "bytes_received")
    )
    return {"method": name, "nodes": nodes, "ranks_per_node": here, "bytes": busiest / SIZE}


def main() -> None:
    output = options(__doc__, output=NEEDED).output
    rows = [count(name, *grid) for grid in GRIDS for name in METHODS]
    write(output, {**machine(), "size": SIZE, "density": DENSITY}, rows)
    show(rows)


if __name__ == "__main__":
    main()
