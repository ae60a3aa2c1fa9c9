"""What methods lost in recorded trainings beside dense ones: docs/records/training.md."""

from __future__ import annotations

from typing import NamedTuple

TASKS = ("intents", "speech", "images", "characters", "words")

STEPS, RANKS = 2000, 8
"""The setting of the recorded trainings."""


class Recorded(NamedTuple):
    """Trainings with one method, beside dense ones of the same seeds.

    Attributes
    ----------
    seeds
        How many trainings on each task.
    points
        Points of accuracy above dense training, by `TASKS`; means over the seeds.
    perplexity
        How much more perplexity the transformer of words has than with dense training, %.
    density
        That was asked for.
    """

    seeds: int
    points: tuple[float, ...]
    perplexity: float
    density: float = 0.01

    @property
    def worst(self) -> tuple[float, str]:
        """Points of accuracy on the task with the fewest, and its name."""
        return min(zip(self.points, TASKS, strict=True))


UNNAMED = "attach's default"
"""What `attach` does where no scheme is named; it has a density and a format of its own."""

RECORDED = {
    UNNAMED: Recorded(3, (-0.08, -0.17, 0.94, 0.02, 0.05), 0.2, density=0.1),
    "topk": Recorded(3, (-0.07, -0.22, 0.21, -0.13, -0.34), 3.9),
    "gtopk": Recorded(3, (-0.07, -0.06, 0.85, -0.36, -0.38), 5.5),
    "oktopk": Recorded(3, (-0.04, -0.33, 0.86, -0.29, -0.26), 4.0),
    "scalecom": Recorded(3, (-0.14, -0.28, -1.73, -0.45, -0.64), 7.5),
    "hitopk": Recorded(1, (0.37, -0.17, 1.54, -0.13, -0.21), 3.6),
}
"""From convergence.json and frontier.json in benchmarks/results; a test compares them."""
