"""Results of a run: its cells, shown as tables and saved as JSON."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Self

import torch

from sparcel.core.formats import format_named
from sparcel.core.schemes import checked_density
from sparcel.errors import InputError, checked_name
from sparcel.tools.bench.contenders import ENGINES
from sparcel.tools.bench.inputs import DISTRIBUTIONS


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
        Sources of rates by engine: see `sparcel.tools.bench.predicted.set_rates`.
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


def machine() -> dict[str, Any]:
    """Describe this machine and the versions of the software."""
    info = Path("/proc/cpuinfo")
    named = re.search("^model name\\s*: (.*)", info.read_text(), re.M) if info.exists() else None
    return {
        "processor": named[1].strip() if named else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sparcel": version("sparcel"),
    }


@dataclass
class Cell:
    """One measurement.

    Attributes
    ----------
    density, k, distribution
        For dense baselines, which depend on the size only: 1, the size, and ``"any"``.
    seconds
        Times of the slowest rank: ``all`` iterations, their ``median`` and ``p95``.
    phases
        Seconds of an average rank by phase: ``select``, ``encode`` (and decode), ``exchange``,
        ``reduce``.
    bytes
        The larger of the bytes sent and received by the worst rank, an iteration.
    wire_share
        The time that the bytes alone need on a node's link, as a share of the median; None if
        the link's rate is not known or several ranks share it.
    speedup
        Speed-up over the dense fp32 all-reduce of this size in the same run, on the faster engine.
    wrong
        Number of wrong coordinates in the checked results, summed over ranks.
    predicted
        Seconds predicted by the cost model; None without rates.
    format
        How sparse streams travelled; dense baselines have none.
    """

    engine: str
    algorithm: str
    size: int
    density: float
    k: int
    distribution: str
    dtype: str
    seconds: dict[str, Any]
    phases: dict[str, float]
    bytes: int
    wire_share: float | None
    speedup: float | None
    wrong: int
    predicted: float | None = None
    format: str = "raw"

    @property
    def median(self) -> float:
        """The median of the iterations, seconds."""
        return float(self.seconds["median"])


@dataclass
class Results:
    """A run: its command, network and machine, and its cells.

    Attributes
    ----------
    network
        ``description``, ``nodes``, ``ranks_per_node``, ``rate_bits_per_s`` (None if unknown).
    rates
        Rates behind the predictions, by engine, as `sparcel.cost.Rates` writes them.
    note
        What a reader must know of the results, as people add it later.
    """

    command: str
    network: dict[str, Any]
    world_size: int
    machine: dict[str, Any] = field(default_factory=machine)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    rates: dict[str, Any] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    note: str = ""

    def save(self, path: Path) -> None:
        """Write the results as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read results that `save` wrote.

        Raises
        ------
        InputError
            When the file holds no results.
        """
        try:
            document = json.loads(path.read_text())
            cells = [Cell(**cell) for cell in document.pop("cells")]
            return cls(**document, cells=cells)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} holds no results of `sparcel bench`: {error!r}") from error


def summarized(seconds: list[float]) -> dict[str, Any]:
    """Return the times with their median and 95th percentile."""
    p95 = quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return {"median": median(seconds), "p95": p95, "all": seconds}
