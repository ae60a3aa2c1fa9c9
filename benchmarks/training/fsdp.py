"""Models that FSDP2 shards in nodes and that are averaged over nodes, by FSDP and by sparcel.

Run it in each rank of an emulated cluster. Its nodes are the replicas, the ranks of a node the
shards. Steps, exchanges, and bytes between nodes:

    sparcel lab run --nodes 2 --ranks-per-node 4 --rate 1gbit -- \
        python -m benchmarks.training.fsdp --output benchmarks/results/fsdp_2x4.json
    sparcel lab run --nodes 4 --ranks-per-node 2 --rate 1gbit -- \
        python -m benchmarks.training.fsdp --output benchmarks/results/fsdp_4x2.json

Also at 100 Mbit/s (`--rate 100mbit --rounds 2`, fsdp_2x4_100mbit.json, fsdp_4x2_100mbit.json). What
a rank holds, and the losses of 200 steps on the text in ``DATA/tinyshakespeare``:

    sparcel lab run --nodes 2 --ranks-per-node 4 --rate none -- \
        python -m benchmarks.training.fsdp --memory --output benchmarks/results/fsdp_memory.json
    sparcel lab run --nodes 2 --ranks-per-node 2 --rate none -- \
        python -m benchmarks.training.fsdp --train DATA \
        --output benchmarks/results/fsdp_training.json

**Steps and exchanges.** All methods take turns. A time is the slowest rank's after a barrier, and
``ms`` the median of all; ``cpu_ms`` is the processor time of an average rank. A step is both
passes, the exchange and the optimiser; ``added_ms`` is what it takes longer than one of the same
turn without exchange between nodes. With "bfloat16" FSDP reduces in that dtype, in the nodes too.
An exchange is what is done with a step's gradients once they are reduced in the nodes, by itself:
FSDP's all-reduces, or the whole work of sparcel. ``speedup`` compares it with FSDP's in bfloat16.

``sent_bytes`` are what the ranks of the busiest node sent in a step, as `Handle.stats` counts them;
``predicted_bytes`` what the formula of the scheme says. They are ``exact`` where it does not matter
which coordinates the ranks select, and otherwise expected of independent selections; of FSDP they
are what rings send. ``link_bytes`` crossed the busiest link, headers and a barrier included.

**Memory.** ``held_bytes`` are all tensors of a rank between two steps, ``resident_bytes`` its
process at that time, after free memory was given back, and ``peak_bytes`` the most in three steps,
each the mean over ranks. The allocator maps larger tensors one by one, so none that is freed stays.
Each method has processes of its own. ``two_vectors_bytes`` and ``bucket_bytes`` are two float32
vectors of the shards' size, and one of the largest module's shard.

**Training.** ``loss`` is the mean of the last 20 steps over all ranks, ``held_out`` that of text
that was held out. To save time, parameters stay whole between the two passes of a step. Trainings
that the output has are not repeated.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.record import Row, network, origin_of, show, write
from benchmarks.training.fsdp_runs import remembered, trainings
from benchmarks.training.fsdp_times import all_rows

SHAPE, LARGER, LARGEST = (384, 3), (640, 5), (1024, 5)
"""Models of 5.4, 25 and 63 million parameters: width and layers."""


def rows_for(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of what the arguments ask for; all ranks call."""
    if arguments.train is not None:
        return trainings(arguments.train, SHAPE, arguments.steps, arguments.output)
    if arguments.memory:
        return remembered(LARGEST)
    return all_rows(SHAPE, (SHAPE, LARGER), arguments.rounds, arguments.repeats)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each method")
    parser.add_argument("--repeats", type=int, default=3, help="steps of a turn")
    parser.add_argument("--memory", action="store_true", help="what ranks hold, instead")
    parser.add_argument("--train", type=Path, metavar="DATA", help="losses, instead")
    parser.add_argument("--steps", type=int, default=200, help="steps of a training")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)  # the ranks share the cores
    rows, head = [], {**origin_of(arguments.train), "network": network()}
    for row in rows_for(arguments):
        rows.append(row)
        if os.environ["RANK"] == "0" and arguments.output is not None:
            write(arguments.output, head, rows)
    if os.environ["RANK"] == "0":
        for _, group in groupby(rows, key=lambda row: str(row["what"])):
            show(group)


if __name__ == "__main__":
    main()
