"""Whether the protocol of islands keeps its promises in a million simulated worlds.

    python -m benchmarks.outer.worlds

A seed decides each world: which islands begin, stop, die, come back and lose one another, and what
becomes of their requests (``tests/outer/world.py``). A row is of ``WORLDS`` seeds: how many islands
there were, how many outer steps they took, which seeds broke a promise, and core seconds. It takes
some three hours of core time; what is recorded already is not repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed

from benchmarks.machine import machine
from benchmarks.record import RESULTS, Row, left_of, show, write
from tests.outer.world import BrokenPromiseError, live

FIRST, WORLDS, PIECES = 2_000_000, 25_000, 40
"""The first seed, which CI's are far from; seeds in a piece; and pieces."""


def lived(seeds: Iterable[int]) -> Row:
    """Live through worlds, and return what happened in them."""
    start, islands, steps, broken = time.process_time(), 0, 0, []
    for seed in seeds:
        try:
            world = live(seed)
        except BrokenPromiseError:
            broken.append(seed)
        else:
            islands += len(world.islands)
            steps += len(world._commits)
    seconds = time.process_time() - start
    return {"islands": islands, "outer_steps": steps, "broken": broken, "core_s": seconds}


def main() -> None:
    output, origin = RESULTS / "outer_worlds.json", machine()
    jobs = [{"first": FIRST + piece * WORLDS, "worlds": WORLDS} for piece in range(PIECES)]
    rows, left = left_of(output, jobs)
    with ProcessPoolExecutor() as pool:
        runs = {
            pool.submit(lived, range(job["first"], job["first"] + job["worlds"])): job
            for job in left
        }
        for run in as_completed(runs):
            rows.append({**runs[run], **run.result(), "commit": origin["commit"]})
            write(output, origin, rows)
            show(rows[-1:])
    broken = [seed for row in rows for seed in row["broken"]]
    print(f"{sum(row['worlds'] for row in rows)} worlds, promises broken in {broken}")


if __name__ == "__main__":
    main()
