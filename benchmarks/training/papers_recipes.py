"""The papers' own recipes, without what sparcel adds, beside dense training.

    python -m benchmarks.training.papers_recipes DATA [--recipes oktopk] [--seeds 3]

``DATA`` is as for ``convergence.py``. Eight ranks of a simulated cluster train on ``images``, as
many samples with every batch. Nothing moves ahead and nothing is front-loaded. Each recipe is
paired with dense training of the same batch, learning rate, steps and seed. Runs that the record
has are not repeated. ``--steps 2000 --recipes scalecom`` trains longer; recipes such as
``"oktopk, ahead"`` change one thing, with ``--methods recipe``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from benchmarks.pages.tables import over_seeds, points, table
from benchmarks.record import Row, among, grid, grouped, run_all, runs_told
from benchmarks.training.task_training import Method, Run, trained
from benchmarks.training.tasks import TASKS
from sparcel.core.comm import Communicator
from sparcel.core.training import Averager

RANKS, TASK = 8, "images"
FIRST_LAYER = ("0.weight",)


@dataclass(frozen=True)
class Recipe:
    """A paper's method for training with batches of ``batch`` samples.

    The first ``dense_share`` of the steps are uncompressed. Of the tensors, only ``whole`` are
    never compressed. ``ahead`` is not of the papers: it tells what a recipe lacks.
    """

    name: str
    batch: int
    lr: float
    scheme: str
    settings: dict[str, object]
    dense_share: float
    whole: Collection[str] = ()
    ahead: bool = False

    def method(self, steps: int) -> Method:
        """Return the method for a training of so many steps."""
        settings = {"warmup": [1], "warmup_steps": round(self.dense_share * steps)}
        return Method(
            self.name, self.scheme, self.settings | settings, ahead=self.ahead, frontload=False
        )


OKTOPK = Recipe(
    "oktopk",
    batch=64,
    lr=0.05,
    scheme="oktopk",
    settings={"density": 0.02, "threshold": "reuse", "put_back": "own"},
    dense_share=512 / (160 * 50_000 / 256),
)
SCALECOM = Recipe(
    "scalecom",
    batch=256,
    lr=0.1,
    scheme="scalecom",
    settings={"density": 0.01, "selector": "chunkwise", "beta": 0.1},
    dense_share=0.1,
    whole=FIRST_LAYER,
)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        OKTOPK,
        replace(
            OKTOPK, name="oktopk, exact thresholds", settings={"density": 0.02, "put_back": "own"}
        ),
        replace(
            OKTOPK,
            name="oktopk, owners keep what loses",
            settings={"density": 0.02, "threshold": "reuse"},
        ),
        replace(OKTOPK, name="oktopk, ahead", ahead=True),
        SCALECOM,
        replace(
            SCALECOM,
            name="scalecom without its filter",
            settings={"density": 0.01, "selector": "chunkwise"},
        ),
        replace(SCALECOM, name="scalecom without chunks", settings={"density": 0.01, "beta": 0.1}),
    )
}
"""Ok-Topk's for VGG-16 on CIFAR-10: a density of 2 %, τ′ = 32, τ = 64, and the 512 dense iterations
of its published code, of 31,250. ScaleCom's for a large batch on ImageNet: 32 samples a rank,
chunks of 100, β = 0.1, a tenth of the training dense (10 of ResNet-50's 100 epochs), its first
layer too. The others change one thing, and are compared with the same dense training."""


class RecipeRun(Run):
    """A training that compresses all tensors but those of the recipe."""

    def __init__(self, data: Path, recipe: Recipe, dense: bool, steps: int, seed: int) -> None:
        task = replace(TASKS[TASK], batch=recipe.batch, lr=recipe.lr, steps=steps)
        dense_method = Method("dense", "dense", ahead=False, frontload=False)
        super().__init__(data, task, dense_method if dense else recipe.method(steps), seed)
        self.whole = recipe.whole

    def averager(self, comm: Communicator) -> Averager:
        return Averager(
            self.named,
            self.scheme,
            group=comm,
            policy=lambda name, _: name in self.whole,
            frontload=False,
        )


def train(data: Path, recipe: str, method: str, seed: int, steps: int) -> Row:
    """Train once by a recipe or densely, and return the row."""
    run = RecipeRun(data, RECIPES[recipe], method == "dense", steps, seed)
    return {"task": TASK, "ranks": RANKS, **trained(run, RANKS), "whole": list(run.whole)}


def recipes_table(rows: list[Row]) -> Iterator[str]:
    """Return the lines of the papers' recipes, each beside dense training with the same seeds."""
    dense = {_training(row): row for row in rows if row["method"] == "dense"}
    others = (row for row in rows if row["method"] != "dense")
    found = grouped(sorted(others, key=lambda row: row["seed"]), "recipe", "steps")
    columns = "recipe", "batch", "steps", "seeds", "dense", "accuracy", "over dense", "sent"
    return table(
        columns, (_recipe(recipe, found[recipe, steps], dense) for recipe, steps in sorted(found))
    )


def _recipe(recipe: str, runs: list[Row], dense: dict[tuple[int, int, int], Row]) -> Iterator[str]:
    pairs = [(run, dense[_training(run)]) for run in runs]
    yield from (recipe, str(runs[0]["batch"]), str(runs[0]["steps"]), str(len(runs)))
    yield f"{mean(base['accuracy'] for _, base in pairs):.2%}"
    yield f"{mean(run['accuracy'] for run in runs):.2%}"
    yield over_seeds(points(pairs), 2)
    yield f"{mean(run['density_before'] for run in runs):.1%}"


def _training(row: Row) -> tuple[int, int, int]:
    return row["batch"], row["steps"], row["seed"]


def main() -> None:
    told = runs_told(
        __doc__,
        "papers_recipes",
        recipes=among(RECIPES, ["oktopk", "scalecom"]),
        methods=["dense", "recipe"],
        seeds=3,
        steps=int,
    )
    samples = TASKS[TASK].steps * TASKS[TASK].batch
    jobs = grid(seed=range(told.seeds), recipe=told.recipes, method=told.methods)
    for job in jobs:
        job["steps"] = told.steps or samples // RECIPES[job["recipe"]].batch
    run_all(told, train, jobs)


if __name__ == "__main__":
    main()
