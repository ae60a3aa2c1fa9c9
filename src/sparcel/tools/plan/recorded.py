"""What methods lost in recorded trainings beside dense ones: docs/records/training.md."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import geometric_mean
from typing import NamedTuple

from sparcel.core.formats import Format
from sparcel.core.schemes import RECOMMENDED, SPARSER, UNDER_MUON, Settings

POWERSGD = "PowerSGD 4"
"""torch's PowerSGD hook, which users would take instead, with matrices of rank 4."""

TASKS = ("intents", "speech", "images", "characters", "words")

STEPS, RANKS = 2000, 8
"""The setting of the recorded trainings."""

MUON = "Muon"
"""The kind of training where Muon trains, whatever the model is."""

LIKE = {"text": ("words", "code"), "images": ("images",), MUON: ("code, Muon",)}
"""The tasks that tell how many steps a method needs, by kind of model or training."""


class Recorded(NamedTuple):
    """Trainings with one method, beside dense ones of the same seeds.

    Attributes
    ----------
    record
        File of benchmarks/results that has them.
    commits
        The first and the last that they were made with, where the method's rule is that of today.
    points
        Points of accuracy above dense training, by `TASKS`; means over the seeds. Empty for Muon.
    perplexity
        How much more perplexity the language model has than with dense training, %.
    factors
        How many times dense training's steps the method needs for the same loss, by task and seed;
        see `benchmarks.training.frontier_report`.
    """

    record: str
    commits: tuple[str, str]
    points: tuple[float, ...]
    perplexity: float
    factors: Mapping[str, tuple[float, ...]]

    @property
    def seeds(self) -> int:
        """How many trainings there are on each task."""
        return min(map(len, self.factors.values()))

    @property
    def worst(self) -> tuple[float, str]:
        """Points of accuracy on the task with the fewest, and its name."""
        return min(zip(self.points, TASKS, strict=True))

    def loses_less(self, other: Recorded) -> bool:
        """Tell whether it ended better: in points of accuracy, or in perplexity without any."""
        if self.points:
            return self.worst > other.worst
        return self.perplexity < other.perplexity

    def seeds_of(self, kind: str) -> int:
        """Return how many trainings there are on each task of a kind."""
        return min(len(self.factors.get(task, ())) for task in LIKE[kind])

    def hardest(self, kind: str) -> str:
        """Return the task of a kind on which the method needs most steps."""
        known = (task for task in LIKE[kind] if task in self.factors)
        return max(known, key=lambda task: geometric_mean(self.factors[task]))

    def factor(self, kind: str) -> float:
        """Return the mean factor on that task, at least 1: no method is counted on to help."""
        return max(1.0, geometric_mean(self.factors[self.hardest(kind)]))


UNNAMED = "attach's default"
"""What `attach` does where no scheme is named."""

AT_10_PER_CENT = "attach at 10 %"
"""The same with `SPARSER`'s settings."""

OWN: dict[str, Settings] = {UNNAMED: RECOMMENDED, AT_10_PER_CENT: SPARSER}
"""The settings of methods that have their own whatever is planned for the others; those that lose
less come first."""

BETWEEN = " on nodes"
"""What the name of such a method ends with where `Hierarchical` runs it."""

_ONE_PER_CENT = "convergence.json"

RECORDED = {
    UNNAMED: Recorded(
        "frontier.json",
        ("d66d15bf", "d66d15bf"),
        (0.08, 0.06, 0.33, -0.02, 0.12),
        -0.5,
        {
            "words": (0.972, 1.043, 0.942),
            "code": (0.997, 1.012, 0.997),
            "images": (1.01, 0.998, 0.976),
        },
    ),
    AT_10_PER_CENT: Recorded(
        "frontier.json",
        ("e935b8b", "961345b"),
        (-0.08, -0.17, 0.94, 0.02, 0.05),
        0.2,
        {
            "words": (1.005, 1.02, 0.99),
            "code": (1.035, 1.059, 1.023),
            "images": (0.881, 0.888, 1.021),
        },
    ),
    POWERSGD: Recorded(
        "frontier.json",
        ("159dadb", "1213d0ab"),
        (-0.14, -0.28, -1.41, -1.25, -0.38),
        4.2,
        {
            "words": (1.094, 1.227, 1.073),
            "code": (1.314, 1.317, 1.319),
            "images": (1.108, 1.209, 1.05),
        },
    ),
    "topk": Recorded(
        _ONE_PER_CENT,
        ("d9ac83e", "f5196f5"),
        (-0.07, -0.22, 0.21, -0.13, -0.34),
        3.9,
        {"words": (1.12, 1.185, 1.057), "images": (1.019, 0.977, 0.933)},
    ),
    "gtopk": Recorded(
        _ONE_PER_CENT,
        ("d9ac83e", "f5196f5"),
        (-0.07, -0.06, 0.85, -0.36, -0.38),
        5.5,
        {"words": (1.194, 1.181, 1.138), "images": (0.973, 0.927, 0.926)},
    ),
    "oktopk": Recorded(
        _ONE_PER_CENT,
        ("9c6dc70", "9c6dc70"),
        (0.21, 0.0, -0.85, -0.61, -1.04),
        11.7,
        {"words": (1.382,), "images": (1.077,)},
    ),
    "scalecom": Recorded(
        _ONE_PER_CENT,
        ("d9ac83e", "f5196f5"),
        (-0.14, -0.28, -1.73, -0.45, -0.64),
        7.5,
        {"words": (1.294, 1.199, 1.219), "images": (1.2, 1.296, 1.044)},
    ),
    "hitopk": Recorded(
        _ONE_PER_CENT,
        ("cad9fa6", "3d131b2"),
        (0.37, -0.17, 1.54, -0.13, -0.21),
        3.6,
        {"words": (1.109,), "images": (0.92,)},
    ),
}
"""A test compares them with the records, and the rules that these are of with today's."""


WITH_MUON = {
    UNNAMED: Recorded(
        "frontier.json",
        ("b316e9f9", "2dbd4379"),
        (),
        0.0,
        {"code, Muon": (1.001, 0.998, 1.001)},
    ),
    AT_10_PER_CENT: Recorded(
        "frontier.json",
        ("323fd5da", "6e2709d3"),
        (),
        8.9,
        {"code, Muon": (1.145, 1.139, 1.138)},
    ),
    POWERSGD: Recorded(
        "frontier.json",
        ("1213d0ab", "1213d0ab"),
        (),
        34.8,
        {"code, Muon": (1.602, 1.557, 1.606)},
    ),
}
"""The same where Muon trains, by which `attach`'s default is another."""


def own_settings(kind: str) -> Mapping[str, Settings]:
    """Return `OWN`, for Muon with the default that `attach` has there."""
    return OWN | {UNNAMED: UNDER_MUON} if kind == MUON else OWN


def recorded(method: str, density: float, format: Format, kind: str) -> Recorded | None:
    """Return the trainings that were recorded with a method as a plan has it.

    Between machines it counts as between ranks: dense sums inside of them round nothing.
    """
    method = method.removesuffix(BETWEEN)
    if kind == MUON:
        return WITH_MUON.get(method)
    as_recorded = method in (*OWN, POWERSGD) or (density == 0.01 and not format.loses)
    return RECORDED.get(method) if as_recorded else None
