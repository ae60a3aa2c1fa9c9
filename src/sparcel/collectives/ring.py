"""All-reduce around a ring: regions collect contributions, then travel on to all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from sparcel import patterns
from sparcel.formats import Expected
from sparcel.ops import SUM, Op
from sparcel.stages import Exchange, Problem, Stage, Work, copied
from sparcel.stream import SparseStream
from sparcel.wire import Wire, collective


@collective
def ring(
    stream: SparseStream, wire: Wire, op: Op = SUM, max_nnz: int | None = None
) -> SparseStream:
    """Reduce over all ranks; each rank exchanges only with its two neighbours.

    In step s of the first half, rank r sends on region r−s, which includes its own slice. After
    P−1 steps rank r holds the complete sum of region r+1. In the second half the complete regions
    travel around the ring.

    Words a rank: at most 2k(P−1) in the first half (fill-in), 2K(P−1)/P in the
    second for a result of K coordinates spread evenly.
    Source: SparCML, section 8.1 (the ring that Figure 3 compares with).
    """
    rank, ranks = wire.rank, wire.size
    boundaries = patterns.regions(stream.size, ranks)
    parts = stream.split(boundaries)
    bound = None if max_nnz is None else max_nnz * ranks
    for step, (after, before, *_) in enumerate(patterns.ring(rank, ranks)):
        leaving, arriving = (rank - step) % ranks, (rank - step - 1) % ranks
        packet, own = wire.pack_region(parts[leaving], boundaries[leaving]), parts[arriving]
        came = wire.exchange({after: packet}, {before: Expected.like(own, bound)})[before]
        parts[arriving] = wire.reduce([came.stream, own], op)
    complete = (rank + 1) % ranks
    packet = wire.pack_region(parts[complete], boundaries[complete])
    parts[complete] = packet.stream
    for step, (after, before, *_) in enumerate(patterns.ring(rank, ranks)):
        arriving = (rank - step) % ranks
        coming = {before: Expected.like(parts[arriving], bound)}
        packet = wire.exchange({after: packet}, coming)[before]
        parts[arriving] = packet.stream
    return wire.concatenate(parts, op)


def stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages of `ring`."""
    rank, ranks, regions = problem.rank, problem.ranks, problem.regions

    def entries(streams: list[int], region: int) -> float:
        return problem.entries(streams, regions[region], regions[region + 1])

    def message(streams: list[int], region: int) -> float:
        return problem.region_message(streams, regions[region], regions[region + 1])

    def pass_on(sent: list[int], leaving: int, came: list[int], arriving: int) -> Iterator[Stage]:
        yield Work("encode", message(sent, leaving))
        yield Exchange("shift", (message(sent, leaving),), (message(came, arriving),))
        yield copied(entries(came, arriving))

    yield copied(problem.k)
    for step in range(ranks - 1):
        leaving, arriving = (rank - step) % ranks, (rank - step - 1) % ranks
        # Region i starts at rank i, and holds the sum over the ranks that it has passed.
        yield from pass_on(
            _around(leaving, step + 1, ranks), leaving, _around(arriving, step + 1, ranks), arriving
        )
        yield Work(
            "merge", entries(_around(arriving, step + 1, ranks), arriving) + problem.k / ranks
        )
    everyone = list(problem.everyone)
    for step in range(ranks - 1):
        yield from pass_on(everyone, (rank + 1 - step) % ranks, everyone, (rank - step) % ranks)
    yield copied(problem.entries(everyone))


def _around(first: int, count: int, ranks: int) -> list[int]:
    """Return ``count`` consecutive ranks of the ring, from ``first`` on."""
    return [(first + step) % ranks for step in range(count)]
