"""Why sparse training ends worse: one switch at a time, and what each protection is worth.

    python -m benchmarks.training.causes DATA [--seeds 2] [--variants "k" "k, ahead"]

``DATA`` holds the folder ``fashion-mnist``. Eight ranks train a small CNN for two epochs at 1 %, in
one process: their memories are the rows of a matrix, so that a rule can be changed in a line. What
the schemes themselves do is measured by ``convergence.py``. Runs that the record has are not
repeated; it has more variants than there are here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

from benchmarks.pages.tables import table
from benchmarks.record import Row, among, grid, run_all, runs_told
from benchmarks.training.task_training import Method, Run, evaluate
from benchmarks.training.tasks import TASKS, batches
from sparcel.core.schemes import front_loaded
from sparcel.core.schemes.density import count_for
from sparcel.core.selectors import topk
from sparcel.core.training import stays_dense

RANKS = 8


@dataclass(frozen=True)
class Rule:
    """What happens between gradients and update.

    Attributes
    ----------
    result
        ``"dense"``; ``"k"``: of all that some rank selects, the k largest sums are applied (gtopk,
        oktopk); ``"leader"``: what one rank selects (scalecom), of each 100 coordinates;
        ``"estimate"``: EF21 (Richtarik et al. 2021), where the memory is an estimate of a rank's
        gradient, selections correct it, and the mean of all estimates is applied.
    density, front, dense_last
        Share that is selected; whether `front_loaded`; how many steps are dense at the end.
    delay
        How many steps later a dense gradient is applied.
    memory, decay
        Whether there is one; what it is multiplied by in each step.
    ahead
        Gradients are computed where ``ahead·lr·memory`` is applied.
    owners
        What the owner of a region does: nothing, or ``"keep"`` the sums that do not win.
    """

    result: str = "k"
    density: float = 0.01
    front: bool = False
    dense_last: int = 0
    delay: int = 0
    memory: bool = True
    decay: float = 1.0
    ahead: float = 0.0
    owners: str = ""


VARIANTS: dict[str, tuple[str, Rule]] = {
    "dense": ("dense", Rule("dense")),
    "dense, 4 steps late": ("dense, applied 4 steps late", Rule("dense", delay=4)),
    "dense, 77 steps late": ("dense, applied 77 steps late", Rule("dense", delay=77)),
    "k, without memory": ("1 %, without memory", Rule(memory=False)),
    "k, memory decays by 0.95": ("1 %, memory decays by 0.95", Rule(decay=0.95)),
    "k": ("1 %, with memory", Rule()),
    "k, density 3 %": ("3 %, with memory", Rule(density=0.03)),
    "k, last 25 % dense": ("1 %, the last quarter dense", Rule(dense_last=468)),
    "k, ahead": ("1 %, one step ahead", Rule(ahead=1.0)),
    "k, ahead by 10": ("1 %, ten steps ahead", Rule(ahead=10.0)),
    "k, both": ("1 %, ahead and front-loaded", Rule(ahead=1.9, front=True)),
    "k, both, owners keep": (
        "the same, owners keep what does not win",
        Rule(ahead=1.9, front=True, owners="keep"),
    ),
    "scalecom": ("one coordinate of each 100, by one rank", Rule("leader")),
    "scalecom, ahead": ("the same, one step ahead", Rule("leader", ahead=1.0)),
    "EF21": ("1 %, EF21's estimates for a memory", Rule("estimate")),
}
"""In the words of why.md, and as rules. ``both``: ahead by 1 + momentum, and front-loaded, which is
what `sparcel.attach` does. ``"scalecom"`` selects as its paper does."""
CHUNK = 100
"""Coordinates of which a leader selects one."""


class Exchange:
    """The memories of all ranks, a row each, and what a step makes of them."""

    def __init__(self, rule: Rule, size: int, steps: int) -> None:
        self.rule, self.steps = rule, steps
        self.memory = torch.zeros(RANKS, size)
        self.owned = torch.arange(size) * RANKS // size == torch.arange(RANKS)[:, None]
        self.late: deque[Tensor] = deque()
        self.step, self.sent = 0, 0.0

    def update(self, gradients: Tensor) -> Tensor:
        """Return the update of gradients ``[ranks, size]``."""
        rule, step, density = self.rule, self.step, self._density()
        self.step += 1
        self.sent += density
        if rule.result == "dense":
            self.late.append(gradients.mean(0))
            return torch.zeros_like(self.late[0]) if step < rule.delay else self.late.popleft()
        if rule.result == "estimate":
            wrong = gradients - self.memory
            chosen = torch.stack([_largest(rank, density) for rank in wrong])
            self.memory = self.memory + wrong * chosen
            return self.memory.mean(0)
        waiting = gradients + rule.decay * self.memory if rule.memory else gradients.clone()
        selected, chosen = self._applied(waiting, density)
        kept = waiting.masked_fill(chosen, 0)
        if rule.owners:
            lost = (kept * selected).sum(0)
            kept = kept.masked_fill(selected, 0) + lost * self.owned
        self.memory = kept
        return (waiting * chosen).mean(0)

    def _density(self) -> float:
        rule = self.rule
        if rule.result == "dense" or self.step >= self.steps - rule.dense_last:
            return 1.0
        return front_loaded(rule.density, self.step) if rule.front else rule.density

    def _applied(self, waiting: Tensor, density: float) -> tuple[Tensor, Tensor]:
        """Return which coordinates of each rank are summed, and applied, ``[ranks, size]`` each."""
        if density == 1:
            everything = torch.ones_like(waiting, dtype=torch.bool)
            return everything, everything
        if self.rule.result == "leader":
            leading = _largest_of_chunks(waiting[(self.step - 1) % RANKS]).expand(RANKS, -1)
            return leading, leading
        selected = torch.stack([_largest(rank, density) for rank in waiting])
        return selected, selected & _largest((waiting * selected).sum(0), density)


def _largest(vector: Tensor, density: float) -> Tensor:
    chosen = torch.zeros_like(vector, dtype=torch.bool)
    indices = topk(vector, count_for(density, len(vector))).indices
    assert indices is not None, "selections are sparse"
    chosen[indices.long()] = True
    return chosen


def _largest_of_chunks(vector: Tensor) -> Tensor:
    rows = nn.functional.pad(vector.abs(), (0, -len(vector) % CHUNK)).view(-1, CHUNK)
    chosen = nn.functional.one_hot(rows.argmax(1), CHUNK).bool()
    return chosen.flatten()[: len(vector)] & (vector != 0)


def tiny_cnn() -> nn.Sequential:
    """Return a CNN of 26,826 parameters for 28×28 images."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16 * 49, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def train(data: Path, variant: str, seed: int) -> Row:
    """Train once with a variant and return its row."""
    rule, task = VARIANTS[variant][1], replace(TASKS["clothes"], model=lambda _: tiny_cnn())
    samples = len(task.read(data / task.folder, seed).y_train)
    task = replace(task, steps=2 * (samples // task.batch))
    run = Run(data, task, Method("dense", "dense"), seed)
    large = {name: p for name, p in run.named.items() if not stays_dense(name, p)}
    exchange = Exchange(rule, sum(p.numel() for p in large.values()), task.steps)
    norms, waits = [], []

    def of_tensors(vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([p.numel() for p in large.values()])
        return {name: part.view_as(large[name]) for name, part in zip(large, parts, strict=True)}

    for step, batch in enumerate(batches(samples, task.batch, task.steps, seed)):
        found = []
        for memory, part in zip(exchange.memory, batch.chunk(RANKS), strict=True):
            ahead = of_tensors(memory * (rule.ahead * task.lr_at(step)))
            found.append(run.gradients(part, {n: large[n] - by for n, by in ahead.items()})[0])
        flat = [torch.cat([one[name].flatten() for name in large]) for one in found]
        update = exchange.update(torch.stack(flat))
        means = {name: torch.stack([one[name] for one in found]).mean(0) for name in run.named}
        run.apply(means | of_tensors(update), step)
        norms.append(float(update.norm()))
        taken = float(update.abs().sum())
        waits.append(float(exchange.memory.mean(0).abs().sum()) / taken if taken else 0.0)
    with torch.no_grad():
        hidden = run.model[:-1](run.split.x_test)  # type: ignore[index]
    return {
        "rule": asdict(rule),
        "steps": task.steps,
        **evaluate(run.model, run.split),
        "dead_units": float((hidden.amax(0) <= 0).double().mean()),
        "update_norm_first_tenth": _finite(norms[: len(norms) // 10]),
        "update_norm": _finite(norms),
        "wait_steps": _finite(waits[len(waits) // 2 :]),
        "mean_density": exchange.sent / task.steps,
    }


def _finite(values: list[float]) -> float | None:
    average = mean(values)
    return average if math.isfinite(average) else None


def causes_table(rows: list[Row]) -> Iterator[str]:
    """Return the lines of a table of what each variant ended at, of one seed."""
    found = {row["variant"]: row for row in rows}
    columns = "variant", "accuracy", "loss", "dead units", "wait", "sent"
    return table(columns, ([words, *_cause(found[name])] for name, (words, _) in VARIANTS.items()))


def _cause(row: Row) -> Iterator[str]:
    yield f"{row['accuracy']:.1%}"
    yield "diverged" if row["loss"] is None else f"{row['loss']:.3f}"
    yield f"{row['dead_units']:.0%}"
    yield "" if row["wait_steps"] is None else f"{row['wait_steps']:.0f}"
    yield f"{row['mean_density']:.1%}"


def main() -> None:
    told = runs_told(__doc__, "causes", seeds=2, variants=among(VARIANTS))
    run_all(told, train, grid(seed=range(told.seeds), variant=told.variants))


if __name__ == "__main__":
    main()
