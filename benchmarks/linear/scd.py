"""Time coordinate descent on an emulated network, with sparse and with dense all-gathers.

    sparcel lab run --nodes 8 --rate 1gbit -- python -m benchmarks.linear.scd WORK \\
        --output benchmarks/results/linear_scd.json

``WORK`` is the folder that `models.py` made of the URLs. Every rank changes 100 coordinates
in an iteration. Each arm takes as many iterations from the same start, in turns, ``--rounds``
times; a first iteration is not counted. All arms end with the same bits.

The arms differ in what ranks send once all have the sums of derivatives. ``nothing`` is sparcel's
own: every rank computes all new values. In the others a rank computes those of its own coordinates
alone. ``sparse`` sends those that changed with their indices, as SparCML does (section 8.2);
``values`` sends all new values without indices, which follow from the seed; ``dense`` sends each
rank's part of all 3,231,961 coordinates, as the paper's baseline does. The record has some more.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np
import torch

from benchmarks.linear.data import SETS, examples, rows_of
from benchmarks.record import NEEDED, Row, among, machine, options, tell, write
from sparcel.core import collectives
from sparcel.core.collectives.doubling import plain_sum
from sparcel.core.comm import Communicator, world
from sparcel.core.kernels import index_dtype
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.products.linear.coordinate_descent import Scd
from sparcel.products.linear.ranks import gathered
from sparcel.products.linear.trainer import Settings
from sparcel.products.rows import shard
from sparcel.products.rows.rows import Array


@dataclass(frozen=True)
class Step:
    """Who owns which of a step's coordinates, and this rank's new values of its own.

    Attributes
    ----------
    scd
        The model before this step.
    chosen
        The coordinates of all ranks, increasing; rank r owns those from ``bounds[r]`` on.
    new
        ``[own]``, this rank's.
    """

    scd: Scd
    chosen: Array
    bounds: Array
    new: Array
    rank: int

    def own(self) -> Array:
        """Return this rank's own of the chosen coordinates."""
        return self.chosen[self.bounds[self.rank] : self.bounds[self.rank + 1]]


Gather: TypeAlias = Callable[[Step, Wire], Array]
"""From each rank's new values of its own coordinates to those of all chosen ones."""


def sparse(step: Step, wire: Wire) -> Array:
    """Gather the values that changed, with their indices."""
    values, own = step.scd.values[:, 0], step.own()
    changed = step.new != values[own]
    stream = SparseStream.unchecked(
        torch.from_numpy(own[changed]).to(index_dtype(len(values))),
        torch.from_numpy(step.new[changed]),
        len(values),
    )
    found = values[step.chosen]
    for part in collectives.all_gather(stream, wire, max_nnz=int(np.diff(step.bounds).max())):
        assert part.indices is not None
        found[np.searchsorted(step.chosen, part.indices.numpy())] = part.values.numpy()
    return found


def values_alone(step: Step, wire: Wire) -> Array:
    """Gather the new values of all chosen coordinates, without indices."""
    counts = np.diff(step.bounds)
    padded = np.zeros(counts.max(), step.new.dtype)
    padded[: len(step.new)] = step.new
    parts = collectives.all_gather(dense_stream(padded), wire)
    return np.concatenate([part.values[:n] for part, n in zip(parts, counts, strict=True)])


def dense(scd: Scd, dimensions: int) -> Gather:
    """Return what gathers each rank's part of a model, whose intercept comes last."""
    places = np.append(scd.columns, dimensions)  # of our coordinates in the model
    starts = np.array([0, *places[scd.slices[1:-1]], dimensions + 1])
    own_part = np.zeros(np.diff(starts).max(), np.float32)

    def gather(step: Step, wire: Wire) -> Array:
        own_part[places[step.own()] - starts[step.rank]] = step.new
        parts = collectives.all_gather(dense_stream(own_part), wire)
        owner = np.repeat(np.arange(wire.size), np.diff(step.bounds))
        found = np.stack([part.values.numpy() for part in parts])
        return found[owner, places[step.chosen] - starts[owner]]

    return gather


def dense_stream(values: Array) -> SparseStream:
    """Return a vector as collectives take it."""
    return SparseStream.unchecked(None, torch.from_numpy(values), len(values))


def gathering(arm: str, scd: Scd, dimensions: int) -> Callable[..., Array]:
    """Return what takes the place of `Scd._exchange`."""
    gathers = {"sparse": sparse, "values": values_alone}
    gather = gathers.get(arm) or dense(scd, dimensions)

    def exchange(chosen: Array, sums: Array, comm: Communicator) -> Array:
        bounds = np.searchsorted(chosen, scd.slices)
        total = plain_sum(torch.from_numpy(sums), comm).numpy()
        own = slice(bounds[comm.rank], bounds[comm.rank + 1])
        new = scd._step(chosen[own], total[own])[:, 0]
        return gather(Step(scd, chosen, bounds, new, comm.rank), Wire(comm))[:, None]

    return exchange


ARMS = ("dense", "sparse", "values", "nothing")


class _EnoughError(Exception):
    """The iterations that are timed are over; all ranks raise it after the same step."""


def timed(arm: str, scd: Scd, dimensions: int, iterations: int, comm: Communicator) -> Row:
    """Return the seconds and bytes of an iteration, the most of any rank; all ranks call."""
    scd.restore({"values": np.zeros_like(scd.values), "losses": np.zeros(0)})
    vars(scd).pop("_exchange", None)
    if arm != "nothing":
        scd._exchange = gathering(arm, scd, dimensions)
    begun = [0.0, 0.0, 0]

    def after_step(step: int) -> None:
        if step == 0:
            begun[:] = [time.perf_counter(), scd.clock.seconds, comm.traffic.volume]
        if step == iterations:
            raise _EnoughError

    try:
        scd.epoch(after_step)
    except _EnoughError:
        now = [time.perf_counter(), scd.clock.seconds, comm.traffic.volume]
    took = (np.array(now) - begun) / iterations
    seconds, waited, volume = np.max(gathered(comm, took.tolist(), "times"), axis=0).tolist()
    return {"gather": arm, "iterations": iterations, "steps_an_epoch": scd.steps} | {
        "seconds": seconds,
        "communication_seconds": waited,
        "bytes": volume,
        "coordinates": len(scd.values),
        "bits": f"{zlib.crc32((scd.values + 0).tobytes()):08x}",
    }


def main() -> None:
    """Time each gather, and write the rows from rank 0."""
    arguments = options(__doc__, "work", iterations=200, rounds=3, arms=among(ARMS), output=NEEDED)
    torch.set_num_threads(1)
    comm = world()
    assert comm is not None, "start it with several ranks"
    part = shard(rows_of(SETS["urls"], arguments.work, "train"), comm.rank, comm.size)
    scd, rows = Scd(examples(part), Settings(solver="scd"), comm), list[Row]()
    for turn, arm in product(range(arguments.rounds), arguments.arms):
        row = timed(arm, scd, part.dimensions, arguments.iterations, comm)
        rows.append({"round": turn, "nodes": comm.size, **row})
        if comm.rank == 0:
            tell(rows[-1])
            write(arguments.output, machine(), rows)
    bits = {row["bits"] for row in rows}
    assert len(bits) <= 1, f"all arms should end with the same bits, got {bits}"


if __name__ == "__main__":
    main()
