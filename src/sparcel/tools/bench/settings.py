"""The settings of `sparcel bench`: its options, and what they say."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from sparcel.core import units
from sparcel.errors import InputError, checked_name
from sparcel.tools.bench import NOW

ENGINES = ("gloo", "mpi")
DISTRIBUTIONS = ("uniform", "clustered", "identical", "file")


@dataclass
class BenchSettings:
    """The options, as they are typed, and what they say.

    Attributes
    ----------
    sizes
        Numbers of coordinates of the vectors: 1000, 25.6M (power of 1000), 16Mi (power of 1024).
    densities
        Shares of the coordinates that each rank sends: 0.01 sends 1 %.
    distributions
        Positions of these coordinates: uniform, clustered (in a few windows), identical (the same
        on all ranks), or file (the largest of --gradients). The default is file with --gradients,
        else uniform.
    algorithms
        Algorithms to measure, separated by commas, or all.
    format
        How sparse streams travel: raw, packed, or rounded, such as packed:4 and raw:bfloat16.
    engines
        gloo, mpi or gloo,mpi. The default is all engines for which the processes were launched.
    whole_step
        Measure whole training steps too: accumulate, select, exchange, update.
    gradients
        File of real gradients, instead of --sizes: .npy, .npz or .pt, with one vector, or one for
        each rank.
    iterations
        Timed runs of each algorithm in a round.
    warmup
        Runs of each algorithm before the timed ones.
    rounds
        Repetitions of all rows, so that a passing disturbance of the machine affects all of them
        alike.
    ranks
        Number of processes to start, if no launcher did.
    rate
        Rate of a machine's link, such as 10gbit; the lab sets it by itself.
    rates
        Show the times that the cost model predicts, too. The rates come from a file of `sparcel
        plan --measure --save`, from one for each engine (gloo=FILE,mpi=FILE), or from a measurement
        (now).
    json
        File for the results.
    coordinates
        The sizes.
    kinds
        The distributions and densities, each with each.
    on
        Engines to measure; if empty, those for which the processes were launched.
    sources
        Sources of rates by engine: see `sparcel.tools.bench.timing.set_rates`.
    bits_per_s
        Rate of a node's link; None to take it from the environment.

    Raises
    ------
    InputError
        When one of them is wrong, or two do not go together.
    """

    sizes: str = "1Mi"
    densities: str = "0.01,0.001"
    distributions: str | None = None
    algorithms: str = "all"
    format: str = "raw"
    engines: str = ""
    whole_step: bool = False
    gradients: Path | None = None
    iterations: Annotated[int, typer.Option(min=1)] = 20
    warmup: Annotated[int, typer.Option(min=1)] = 2
    rounds: Annotated[int, typer.Option(min=1)] = 1
    ranks: Annotated[int, typer.Option(min=1)] = 4
    rate: str | None = None
    rates: str = ""
    json: Path | None = None

    def __post_init__(self) -> None:
        # These load torch, which help does not need.
        from sparcel.core.formats import format_named
        from sparcel.core.schemes import checked_density
        from sparcel.tools.bench.contenders import names

        self.coordinates = [units.whole(size) for size in _items(self.sizes)]
        densities = [checked_density(_share(density)) for density in _items(self.densities)]
        distributions = _items(self.distributions or ("file" if self.gradients else "uniform"))
        for distribution in distributions:
            checked_name(distribution, DISTRIBUTIONS, "distribution")
        self.kinds = list(product(distributions, densities))
        self.on = tuple(checked_name(name, ENGINES, "engine") for name in _items(self.engines))
        self.sources = dict(_source(item) for item in _items(self.rates))
        self.bits_per_s = None if self.rate is None else units.bits_per_s(self.rate)
        format_named(self.format)
        names(self.algorithms, self.whole_step, ranks_per_node=2)
        if "file" in distributions and self.gradients is None:
            raise InputError("the distribution 'file' needs --gradients FILE")
        if self.gradients is not None and "file" not in distributions:
            raise InputError(
                "--gradients FILE is measured as the distribution 'file', got"
                f" {', '.join(distributions)}; leave --distributions out, or add file to it"
            )


def _items(text: str) -> list[str]:
    """Return the items of a list separated by commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"a density is a share such as 0.01, got {text!r}") from None


def _source(item: str) -> tuple[str, str]:
    """Return the engine's name, empty for all engines, and the source of its rates."""
    engine, equals, source = item.partition("=")
    if not equals or engine not in ENGINES:  # a path may contain "=" too
        engine, source = "", item
    if source != NOW and not Path(source).is_file():
        raise InputError(f"can't read rates: there is no file {source}")
    return engine, source if source == NOW else str(Path(source).resolve())
