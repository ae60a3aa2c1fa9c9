"""A schedule as a table, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sparcel.training.phase import Phase

_HEAD = ("from", "to", "scheme", "lr", "resolution", "batch size")


def table(phases: Sequence[Phase], starts: Sequence[float]) -> str:
    """Return a line for each phase; ``starts`` also holds where the last one ends."""
    rows = [
        (f"{start:g}", f"{stop:g}", str(phase.scheme), *_told(phase))
        for phase, (start, stop) in zip(phases, pairwise(starts), strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (_HEAD, *rows)
    )
    return "\n".join(lines)


def _told(phase: Phase) -> tuple[str, str, str]:
    """Return the rule for the rate, the resolution and the batch size as texts."""
    rate = phase.lr
    if isinstance(rate, tuple):
        rule = f"{rate[0]:g} to {rate[1]:g}"
    else:
        rule = getattr(rate, "__name__", "a function") if callable(rate) else f"{rate:g}"
    sizes = (phase.resolution, phase.batch_size)
    resolution, batch = ("" if size is None else str(size) for size in sizes)
    return rule, resolution, batch
