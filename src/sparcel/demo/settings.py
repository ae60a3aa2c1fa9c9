"""The settings of a run of the demo, and the methods that it compares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

BATCH_PER_RANK = 16
WARM_UP_STEPS = 5
"""First steps, which are not timed: they allocate memory, and DDP rebuilds its buckets in them."""
COMPUTE_STEPS = 20
"""Steps without an exchange, timed after training to measure the computation alone."""


@dataclass(frozen=True)
class DemoSettings:
    """Settings of the workers, the same for all ranks.

    Attributes
    ----------
    steps
        Optimiser steps of each method, warm-up included.
    seed
        Seed of the model's initial weights and of the order of the samples.
    density
        Share of the gradient's coordinates that a scheme sends, in (0, 1].
    schemes
        Names of the sparse schemes to compare with dense training.
    data
        Path of the data; None for scikit-learn's digits.
    counts_wire
        Whether the interface carries only this rank's traffic, so that its counter is that of the
        bytes on the wire.
    """

    steps: int
    seed: int
    density: float
    schemes: tuple[str, ...]
    data: str | None
    counts_wire: bool

    def to_json(self) -> str:
        """Return the settings as text, for a worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read settings that :meth:`to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "schemes": tuple(fields["schemes"])})


@dataclass(frozen=True)
class Method:
    """One way to exchange gradients.

    Attributes
    ----------
    name
        Name in the table.
    scheme
        Name of sparcel's scheme, or None for plain DDP.
    options
        Settings of the scheme.
    """

    name: str
    scheme: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


FP32 = Method("dense fp32")
BF16 = Method("dense bf16", "dense", {"wire": "bfloat16"})


def methods(settings: DemoSettings) -> list[Method]:
    """Return the methods that a run compares, the two dense baselines first."""
    sparse = [Method(name, name, {"density": settings.density}) for name in settings.schemes]
    return [FP32, BF16, *sparse]
