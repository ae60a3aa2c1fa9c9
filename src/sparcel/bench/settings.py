"""The settings of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparcel.bench.engines import ENGINES
from sparcel.bench.inputs import DISTRIBUTIONS
from sparcel.errors import InputError, checked_name
from sparcel.formats import format_named
from sparcel.schemes import checked_density


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a run of `sparcel bench`.

    Attributes
    ----------
    engines
        Engines to measure; if empty, those for which the processes were launched.
    iterations, warmup
        Number of timed runs of a row in a round, and of runs before them.
    rounds
        Number of rounds.
    gradients
        File of real gradients, for the distribution ``"file"``; their length is then the size.
    rates
        Sources of rates by engine: see `sparcel.bench.predicted.set_rates`.
    rate_bits_per_s
        Rate of a node's link; None to take it from the environment.
    format
        How sparse streams travel, by name.
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
    format: str = "raw"

    def __post_init__(self) -> None:
        format_named(self.format)
        for density in self.densities:
            checked_density(density)
        for distribution in self.distributions:
            checked_name(distribution, DISTRIBUTIONS, "distribution")
        for engine in self.engines:
            checked_name(engine, ENGINES, "engine")
        if "file" in self.distributions and self.gradients is None:
            raise InputError("the distribution 'file' needs --gradients FILE")
        if self.gradients is not None and "file" not in self.distributions:
            raise InputError(
                "--gradients FILE is measured as the distribution 'file', got"
                f" {', '.join(self.distributions)}; leave --distributions out, or add file to it"
            )
