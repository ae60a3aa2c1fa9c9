"""Selectors: which coordinates of a dense vector go into a stream."""

from __future__ import annotations

import inspect
from typing import Any

from sparcel.core.selectors.base import ExactTopK, Selector, overlap, topk
from sparcel.core.selectors.from_papers import Bucketed, Chunkwise, MSTopK, RandomK, ThresholdReuse
from sparcel.errors import InputError, checked_name

__all__ = [
    "SELECTORS",
    "Bucketed",
    "Chunkwise",
    "ExactTopK",
    "MSTopK",
    "RandomK",
    "Selector",
    "ThresholdReuse",
    "overlap",
    "selector",
    "topk",
]

SELECTORS: dict[str, type[Selector]] = {
    "exact": ExactTopK,
    "bucketed": Bucketed,
    "chunkwise": Chunkwise,
    "mstopk": MSTopK,
    "reuse": ThresholdReuse,
    "randomk": RandomK,
}


def selector(choice: str | Selector, **settings: Any) -> Selector:
    """Make the selector of that name; a selector is returned as it is.

    Parameters
    ----------
    choice
        A name in `SELECTORS`, or a selector.
    settings
        What the selector's class takes.

    Raises
    ------
    InputError
        For a name or a setting that does not exist, a value out of range, or settings beside a
        selector, which has its own.
    """
    if isinstance(choice, Selector):
        if settings:
            raise InputError(
                f"{choice} has its settings already, got {', '.join(settings)} beside it;"
                " give a name, or make the selector with them"
            )
        return choice
    kind = SELECTORS[checked_name(choice, SELECTORS, "selector")]
    accepted = list(inspect.signature(kind).parameters)
    for setting in settings:
        checked_name(setting, accepted, f"a setting of selector {choice!r}")
    return kind(**settings)
