"""Whether the protocol of islands keeps its promises in a million simulated worlds.

    python -m benchmarks.outer.worlds

A seed decides each world: which islands begin, stop, die, come back and lose one another, and what
becomes of their requests (``tests/outer/world.py``). A row is of ``WORLDS`` seeds: how many islands
there were, which seeds broke a promise or raised an error, and core seconds. It takes some three
hours of core time; what the same commit has recorded is not repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed

from benchmarks.record import RESULTS, Row, machine, rows_of, show, write
from tests.outer.world import live

FIRST, WORLDS, PIECES = 2_000_000, 25_000, 40
"""The first seed, which CI's are far from; seeds in a piece; and pieces."""


def lived(seeds: Iterable[int]) -> Row:
    """Live through worlds, and return what happened in them."""
    start, islands, broken = time.process_time(), 0, []
    for seed in seeds:
        try:
            islands += len(live(seed).islands)
        except Exception:
            broken.append(seed)
    return {"islands": islands, "broken": broken, "core_s": time.process_time() - start}


def main() -> None:
    output, origin = RESULTS / "outer_worlds.json", machine()
    commit = origin["commit"]
    rows = [row for row in rows_of(output) if row["commit"] == commit]
    done = {row["first"] for row in rows}
    left = {FIRST + piece * WORLDS for piece in range(PIECES)} - done
    with ProcessPoolExecutor() as pool:
        runs = {pool.submit(lived, range(first, first + WORLDS)): first for first in sorted(left)}
        for run in as_completed(runs):
            rows.append({"first": runs[run], "worlds": WORLDS, **run.result(), "commit": commit})
            write(output, origin, rows)
            show(rows[-1:])
    if broken := [seed for row in rows for seed in row["broken"]]:
        raise SystemExit(f"promises are broken in the worlds of the seeds {broken}")
    print(f"all promises were kept in {sum(row['worlds'] for row in rows)} worlds")


if __name__ == "__main__":
    main()
