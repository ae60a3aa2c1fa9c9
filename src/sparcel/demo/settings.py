"""What a run of the demo is made of: its settings, and the methods that it compares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

BATCH_PER_RANK = 16
WARM_UP_STEPS = 5
"""Steps left out of all timings: first allocations, and DDP's buckets before they are rebuilt."""
COMPUTE_STEPS = 20
"""Steps without any exchange, timed after training to learn what computation costs alone."""


@dataclass(frozen=True)
class DemoSettings:
    """What the workers need to know, the same for all ranks.

    Attributes
    ----------
    steps
        Optimiser steps of each method, warm-up included.
    seed
        Of the model's initial weights and of the order of the samples.
    density
        Share of the gradient's coordinates that a scheme sends, in (0, 1].
    schemes
        Names of the sparse schemes to compare with dense training.
    data
        Where the data lies; None for scikit-learn's digits.
    counts_wire
        Whether the interface carries this rank's traffic alone, so that its counter tells the
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
        """Read what :meth:`to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "schemes": tuple(fields["schemes"])})


@dataclass(frozen=True)
class Method:
    """One way to exchange gradients.

    Attributes
    ----------
    name
        What the table calls it.
    scheme
        sparcel's scheme, or None for DDP as PyTorch has it.
    options
        The scheme's settings.
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
