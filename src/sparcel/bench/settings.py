"""What is to be measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from sparcel.bench.engines import ENGINES
from sparcel.bench.inputs import DISTRIBUTIONS
from sparcel.errors import InputError, known
from sparcel.schemes import check_density


@dataclass(frozen=True)
class BenchSettings:
    """What `sparcel bench` was asked for.

    Attributes
    ----------
    engines
        Empty: those for which the processes were launched.
    iterations, warmup, rounds
        How often each row is timed, and runs before that, in a round; how many rounds.
    gradients
        File of real gradients, for the distribution ``"file"``; their length is then the size.
    rates
        By engine, where predictions come from: see `sparcel.bench.predicted.rates_for`.
    rate_bits_per_s
        What a node's link carries, where the environment does not tell.
    """

    sizes: tuple[int, ...]
    densities: tuple[float, ...]
    distributions: tuple[str, ...]
    algorithms: str = "all"
    engines: tuple[str, ...] = ()
    iterations: int = 20
    warmup: int = 2
    rounds: int = 1
    whole_step: bool = False
    gradients: str | None = None
    rate_bits_per_s: int | None = None
    json: str | None = None
    command: str = ""
    rates: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for density in self.densities:
            check_density(density)
        for distribution in self.distributions:
            known(distribution, DISTRIBUTIONS, "distribution")
        for engine in self.engines:
            known(engine, ENGINES, "engine")
        if "file" in self.distributions and self.gradients is None:
            raise InputError("the distribution 'file' needs --gradients FILE")
        if self.gradients is not None and "file" not in self.distributions:
            raise InputError(
                "--gradients FILE is measured as the distribution 'file', got"
                f" {', '.join(self.distributions)}; leave --distributions out, or add file to it"
            )

    def to_json(self) -> str:
        """Return the settings as text, for other processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` returned."""
        fields: Any = json.loads(text)
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)
