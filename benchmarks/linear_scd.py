"""Time coordinate descent on an emulated network, with sparse and with dense all-gathers.

    sparcel lab run --nodes 8 --rate 1gbit -- python benchmarks/linear_scd.py WORK \\
        --output benchmarks/results/linear_scd.json

``WORK`` is the folder that `linear_models.py` made of the URLs. Every rank changes 100 coordinates
in an iteration. Each arm takes as many iterations from the same start, in turns, ``--rounds``
times; a first iteration is not counted. All arms that are not asynchronous end with the same bits.

The arms differ in what ranks send once all have the sums of derivatives. ``nothing`` and ``sparse``
are sparcel's own. ``values`` sends new values without indices, which follow from the seed;
``dense`` sends each rank's part of all 3,231,961 coordinates, as the paper does, and ``dense over
columns that occur`` of those that are not always zero.
"""

from __future__ import annotations

import argparse
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from linear_data import SETS, rows_of
from machine import machine
from record import Row, write

from sparcel import collectives
from sparcel.comm import Communicator, world
from sparcel.linear.ranks import gathered
from sparcel.linear.scd import Scd
from sparcel.linear.scd.updates import GATHERS, Gathered, Share, Updates
from sparcel.rows import shard
from sparcel.rows.rows import Array
from sparcel.stream import SparseStream
from sparcel.wire import Wire


class Values(Gathered):
    """Gathers the new values of all chosen coordinates, without indices."""

    def _gather(self, share: Share, wire: Wire) -> Array:
        most = int(np.diff(share.bounds).max())
        padded = np.zeros(most, share.new.dtype)
        padded[: len(share.new)] = share.new[:, 0]
        parts = collectives.all_gather(dense_stream(padded), wire)
        counts = np.diff(share.bounds)
        return np.concatenate([part.values[:n] for part, n in zip(parts, counts, strict=True)])[
            :, None
        ]


class Dense(Gathered):
    """Gathers each rank's whole part of the model, in which coordinate i is at ``places[i]``."""

    def __init__(self, comm: Communicator, places: Array, length: int) -> None:
        super().__init__(comm, len(places))
        self._places = places
        self._starts = np.array([0, *places[self.slices[1:-1]], length])
        self._part = np.zeros(np.diff(self._starts).max(), np.float32)

    def _gather(self, share: Share, wire: Wire) -> Array:
        self._part[self._places[share.own()] - self._starts[share.rank]] = share.new[:, 0]
        parts = collectives.all_gather(dense_stream(self._part), wire)
        owner = np.repeat(np.arange(wire.size), np.diff(share.bounds))
        places = self._places[share.chosen] - self._starts[owner]
        return np.stack([part.values.numpy() for part in parts])[owner, places][:, None]


def dense_stream(values: Array) -> SparseStream:
    """Return a vector as collectives take it."""
    return SparseStream.unchecked(None, torch.from_numpy(values), len(values))


def updates_of(arm: str, scd: Scd, dimensions: int, comm: Communicator) -> Updates:
    """Return the exchange of an arm."""
    size, name = len(scd.values), arm.removesuffix(", asynchronous")
    if name == "dense":  # the intercept comes last
        return Dense(comm, np.append(scd.columns, dimensions), dimensions + 1)
    if name == "dense over columns that occur":
        return Dense(comm, np.arange(size), size)
    return {**GATHERS, "values": Values}[name](comm, size)


ARMS = (
    *("dense", "dense over columns that occur", "sparse", "values", "nothing"),
    *("sparse, asynchronous", "nothing, asynchronous"),
)


class _EnoughError(Exception):
    """The iterations that are timed are over; all ranks raise it after the same step."""


def trainers(work: Path, comm: Communicator) -> tuple[dict[bool, Scd], int]:
    """Return what trains with and without delay, and the number of dimensions; all ranks call."""
    rows = shard(rows_of(SETS["urls"], work, "train"), comm.rank, comm.size)
    targets = np.where(rows.labels == "1", 1, -1).astype(np.float32)
    both = {
        late: Scd(rows, targets, l2=1e-6, comm=comm, asynchronous=late) for late in (False, True)
    }
    return both, rows.dimensions


def timed(arm: str, scd: Scd, dimensions: int, iterations: int, comm: Communicator) -> Row:
    """Return the seconds and bytes of an iteration, the most of any rank; all ranks call."""
    scd.restore({"values": np.zeros_like(scd.values), "losses": np.zeros(0)})
    scd.updates = updates_of(arm, scd, dimensions, comm)
    begun = [0.0, 0.0, 0]

    def after_step(step: int) -> None:
        if step == 0:
            begun[:] = [time.perf_counter(), scd.waited, comm.traffic.volume]
        if step == iterations:
            raise _EnoughError

    try:
        scd.epoch(after_step)
    except _EnoughError:
        now = [time.perf_counter(), scd.waited, comm.traffic.volume]
    took = (np.array(now) - begun) / iterations
    seconds, waited, volume = np.max(gathered(comm, took.tolist()), axis=0).tolist()
    return {"gather": arm, "iterations": iterations, "steps_an_epoch": scd.steps} | {
        "seconds": seconds,
        "communication_seconds": waited,
        "bytes": volume,
        "coordinates": len(scd.values),
        "bits": f"{zlib.crc32(scd.values.tobytes()):08x}",
    }


def main() -> None:
    """Time each gather, and write the rows from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comm = world()
    assert comm is not None, "start it with several ranks"
    rows: list[Row] = []
    both, dimensions = trainers(arguments.work, comm)
    for turn in range(arguments.rounds):
        for arm in arguments.arms:
            scd = both[arm.endswith("asynchronous")]
            row = timed(arm, scd, dimensions, arguments.iterations, comm)
            rows.append({"round": turn, "nodes": comm.size, **row})
            if comm.rank == 0:
                print(rows[-1], flush=True)
                write(arguments.output, machine(), rows)
    bits = {row["bits"] for row in rows if not row["gather"].endswith("asynchronous")}
    assert len(bits) <= 1, f"all arms should end with the same bits, got {bits}"


if __name__ == "__main__":
    main()
