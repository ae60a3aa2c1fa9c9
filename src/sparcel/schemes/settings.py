"""The settings of all schemes, with their types, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from sparcel.formats import Format
from sparcel.selectors import Selector


class Settings(TypedDict, total=False):
    """What `sparcel.scheme` and `sparcel.attach` take by name; each scheme takes some of them.

    The schemes' own classes and functions describe them and hold their defaults.
    """

    algorithm: str
    answer: str | Format | None
    beta: float
    beta_steps: int | None
    beta_switch: str | None
    bits: int | None
    boundary_steps: int | None
    candidates: Sequence[str]
    clip: float | None
    density: float
    format: str | Format
    momentum: float
    put_back: str
    ranks_per_node: int | None
    returned: float | None
    seed: int | None
    selector: str | Selector
    threshold: str
    threshold_steps: int | None
    warmup: Sequence[float]
    warmup_steps: int | None
    wire: str | None
