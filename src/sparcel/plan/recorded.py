"""What methods lost in recorded trainings beside dense ones: docs/records/training.md."""

from __future__ import annotations

from statistics import geometric_mean
from typing import NamedTuple

from sparcel.formats import Format

TASKS = ("intents", "speech", "images", "characters", "words")

STEPS, RANKS = 2000, 8
"""The setting of the recorded trainings."""


class Recorded(NamedTuple):
    """Trainings with one method, beside dense ones of the same seeds.

    Attributes
    ----------
    record
        File of benchmarks/results that has them.
    commits
        The first and the last that they were made with, where the method's rule is that of today.
    seeds
        How many trainings on each task.
    points
        Points of accuracy above dense training, by `TASKS`; means over the seeds.
    perplexity
        How much more perplexity the transformer of words has than with dense training, %.
    factors
        How many times dense training's steps that transformer needs for the same loss, by seed;
        see `benchmarks.training.step_factors`.
    density
        That was asked for.
    """

    record: str
    commits: tuple[str, str]
    seeds: int
    points: tuple[float, ...]
    perplexity: float
    factors: tuple[float, ...]
    density: float = 0.01

    @property
    def factor(self) -> float:
        """The mean of the factors."""
        return geometric_mean(self.factors)

    @property
    def worst(self) -> tuple[float, str]:
        """Points of accuracy on the task with the fewest, and its name."""
        return min(zip(self.points, TASKS, strict=True))


UNNAMED = "attach's default"
"""What `attach` does where no scheme is named; it has a density and a format of its own."""

_ONE_PER_CENT = "convergence.json"

RECORDED = {
    UNNAMED: Recorded(
        "frontier.json",
        ("e935b8b", "961345b"),
        seeds=3,
        points=(-0.08, -0.17, 0.94, 0.02, 0.05),
        perplexity=0.2,
        factors=(1.005, 1.02, 0.99),
        density=0.1,
    ),
    "topk": Recorded(
        _ONE_PER_CENT,
        ("d9ac83e", "f5196f5"),
        3,
        (-0.07, -0.22, 0.21, -0.13, -0.34),
        3.9,
        (1.12, 1.185, 1.057),
    ),
    "gtopk": Recorded(
        _ONE_PER_CENT,
        ("d9ac83e", "f5196f5"),
        3,
        (-0.07, -0.06, 0.85, -0.36, -0.38),
        5.5,
        (1.194, 1.181, 1.138),
    ),
    "oktopk": Recorded(
        _ONE_PER_CENT, ("9c6dc70", "9c6dc70"), 1, (0.21, 0.0, -0.85, -0.61, -1.04), 11.7, (1.382,)
    ),
    "scalecom": Recorded(
        _ONE_PER_CENT,
        ("d9ac83e", "f5196f5"),
        3,
        (-0.14, -0.28, -1.73, -0.45, -0.64),
        7.5,
        (1.294, 1.199, 1.219),
    ),
    "hitopk": Recorded(
        _ONE_PER_CENT, ("cad9fa6", "3d131b2"), 1, (0.37, -0.17, 1.54, -0.13, -0.21), 3.6, (1.109,)
    ),
}
"""A test compares them with the records, and the rules that these are of with today's."""


def recorded(method: str, density: float, format: Format) -> Recorded | None:
    """Return the trainings that were recorded with a method as it is planned."""
    known = RECORDED.get(method)
    if known is None or method == UNNAMED:
        return known
    return known if density == known.density and not format.loses else None
