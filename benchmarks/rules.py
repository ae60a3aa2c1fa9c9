"""Which rule a recorded training is of: a fingerprint of what its scheme does to gradients.

A rule is told by what it does, not by its code. So a refactoring leaves its fingerprint alone, and
a row that was trained by another rule is known by the fingerprint that it holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

import sparcel
from sparcel.core.comm import Communicator
from sparcel.errors import InputError

RANKS = 8
"""As many as in the records."""

LENGTHS = {1 << 12: 8, 1 << 17: 1}
"""Coordinates of vectors, and how many steps each takes. Several show what is done with memory. On
a long vector exchanges take no shortcut for short ones; more steps of it would depend on which rank
owns what, which belongs to no rule."""


def rule_of(scheme: str, settings: Mapping[str, Any]) -> str:
    """Return eight hexadecimal digits that stand for the updates of a scheme.

    The ranks' gradients are partly in common. They are in float64 and updates compared in float32,
    so that the order of sums does not matter. A warm-up is left out, because it is longer than the
    few steps that are done.
    """
    after = {name: one for name, one in settings.items() if not name.startswith("warmup")}
    made = sparcel.scheme(scheme, **after)

    def on_rank(comm: Communicator) -> str:
        updates = hashlib.sha256()
        for size, steps in LENGTHS.items():
            own = made.fresh()
            for step in range(steps):
                gradient = _numbers(step, size) + _numbers(steps + RANKS * step + comm.rank, size)
                update = own.step(gradient, comm).float()
                updates.update((update + 0.0).numpy().tobytes())  # −0 becomes 0
        return updates.hexdigest()[:8]

    return str(sparcel.simulate(RANKS, on_rank).results[0])


def _numbers(seed: int, size: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 17), 1 << 17, (size,), generator=draws).double()


def is_todays(row: Mapping[str, Any]) -> bool:
    """Return whether a row of a record is of today's rule, or of none, as torch's hooks are."""
    return "scheme" not in row or row.get("rule") == _todays(
        row["scheme"], json.dumps(row["settings"], sort_keys=True)
    )


@cache
def _todays(scheme: str, settings: str) -> str:
    try:
        return rule_of(scheme, json.loads(settings))
    except InputError:
        return "there is no such scheme, or no such setting"
