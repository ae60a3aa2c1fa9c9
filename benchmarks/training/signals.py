"""What the papers assume of gradients and observe in training, looked at in the suite's trainings.

    python -m benchmarks.training.signals DATA [--tasks images]

Trains with each of `METHODS` at a constant 1 %, with step-ahead. Every 40 steps all that concerns
one step is computed from the memories and gradients of all ranks; the coordinates that rank 0 sent
and that the update had are counted in every step. Three times it is counted how the sum of up to 64
ranks fills in. ``DATA`` is as for ``convergence.py``. Runs that the record has are not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

import sparcel
from benchmarks.record import Row, among, grid, run_all, runs_told
from benchmarks.streams.paper_selectors import GaussianK
from benchmarks.training.task_training import Method, Run, evaluate
from benchmarks.training.tasks import TASKS, Task, loss_of
from sparcel.core.comm import Communicator
from sparcel.core.schemes.density import count_for
from sparcel.core.selectors import selector, topk
from sparcel.core.training import Averager, stays_dense
from sparcel.tools import analysis

RANKS, DENSITY, EVERY = 8, 0.01, 40
MANY, DENSITIES = 64, (0.001, 0.01, 0.05, 0.1)
"""Ranks and densities for which the fill-in of sums is counted."""

_METHODS = (
    Method("topk", "topk", frontload=False),
    Method("oktopk", "oktopk", frontload=False),
    Method("oktopk reuse", "oktopk", {"threshold": "reuse"}, frontload=False),
    Method(
        "gaussiank, as estimated",
        "topk",
        {"selector": GaussianK(factor=None), "algorithm": "allgather"},
        frontload=False,
    ),
    Method("scalecom", "scalecom", frontload=False),
)
METHODS = {method.label: method for method in _METHODS}


class Watched(Run):
    """A training that looks at all ranks' memories and gradients.

    Attributes
    ----------
    found
        A dict of figures for every step that was looked at.
    counts
        For every step: coordinates that rank 0 sent and that the update had, over those asked for.
    growth
        The density of a sum over 1, 2, 4 … ranks, by step and density.
    """

    def __init__(self, data: Path, task: Task, method: Method, seed: int) -> None:
        super().__init__(data, task, method, seed)
        self.large = [name for name, p in self.named.items() if not stays_dense(name, p)]
        self.sizes = [self.named[name].numel() for name in self.large]
        self.found: list[dict[str, float | None]] = []
        self.counts: list[tuple[float, float]] = []
        self.growth: dict[int, dict[str, list[float]]] = {}
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(
        self, comm: Communicator, step: int, gradients: Mapping[str, Tensor], averager: Averager
    ) -> None:
        if comm.rank == 0 and step > 0:
            self._count(averager)
        # Memory begins in the first step.
        if step == 0 or step % EVERY:
            return
        memory = averager.handle.state_dict()
        of_rank = {name: memory[f"rank{comm.rank}.{name}"] for name in self.large}
        self._seen[comm.rank] = (self._flat(gradients), self._flat(of_rank))
        comm.gather_numbers(0)  # all ranks' are there
        if comm.rank == 0:
            found = [self._seen[rank] for rank in range(comm.size)]
            self.found.append({"step": step, **look(found, step % comm.size)})
            if step // EVERY in (1, self.task.steps // EVERY // 2, self.task.steps // EVERY - 1):
                self.growth[step] = self._growth(step)
        comm.gather_numbers(0)  # the model may change

    def _count(self, averager: Averager) -> None:
        last, small = averager.handle.stats().last, sum(map(Tensor.numel, self.named.values()))
        small -= sum(self.sizes)
        asked = last.asked - small
        self.counts.append(((last.selected - small) / asked, (last.reduced - small) / asked))

    def _flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in self.large])

    def _growth(self, step: int) -> dict[str, list[float]]:
        """Count the sum of the gradients of 64 ranks, without memory."""
        each = self.task.batch // RANKS
        draws = torch.Generator().manual_seed(step)
        chosen = torch.randint(len(self.split.y_train), (MANY, each), generator=draws)
        grown = analysis.fill_in(map(self._gradient, chosen), DENSITIES, ("exact",))
        powers = [2**p - 1 for p in range(MANY.bit_length())]
        return {
            f"{density:g}": [round(one.density[place], 5) for place in powers]
            for (density, _), one in grown.items()
        }

    def _gradient(self, samples: Tensor) -> Tensor:
        loss = loss_of(self.model, self.split.x_train[samples], self.split.y_train[samples])
        found = torch.autograd.grad(loss, [self.named[name] for name in self.large])
        return torch.cat([gradient.flatten() for gradient in found])


def look(found: Sequence[tuple[Tensor, Tensor]], leader: int) -> dict[str, float | None]:
    """Return the figures of a step from each rank's gradient and memory, ``[size]`` each.

    ``xi`` is Ok-Topk's ξ, ``xi_sum`` that of SparCML's Assumption C.2. ``hamming``, ``spearman``
    and the contractions compare one rank's memory + gradient with the mean of all ranks'.
    """
    gradients, memories = (list(part) for part in zip(*found, strict=True))
    accumulated = [gradient + memory for gradient, memory in found]
    k = count_for(DENSITY, gradients[0].numel())
    true, mine = torch.stack(accumulated).mean(0), accumulated[leader]
    chosen = topk(mine, k)
    chunked = selector("chunkwise").select(mine, k)
    cosine = analysis.cosine_similarities(accumulated)
    own = mean(analysis.contraction(one, chunked) for one in accumulated)
    norms = [float(one.norm()) for one in memories]
    figures = {
        "xi": analysis.xi(accumulated, gradients, k),
        "xi_sum": xi_sum(accumulated, gradients, k),
        "memory_cosine": _pairwise(analysis.cosine_similarities(memories)),
        "gradient_cosine": _pairwise(analysis.cosine_similarities(gradients)),
        "accumulated_cosine": _pairwise(cosine),
        "hamming": analysis.normalized_hamming_distance(chosen, topk(true, k)),
        "spearman": analysis.spearman(mine, true),
        "memory_quantiles": analysis.quantile_agreement(memories[0], memories[1]),
        "gradient_quantiles": analysis.quantile_agreement(gradients[0], gradients[1]),
        "accumulated_quantiles": analysis.quantile_agreement(mine, true),
        "contraction_own": own,
        "contraction_true": analysis.contraction(true, chunked),
        "contraction_leader": analysis.contraction(true, chosen),
        "contraction_best": analysis.contraction(true, topk(true, k)),
        "cosine_needed": (RANKS * own - 1) / (RANKS - 1),
        "memory_over_gradient": mean(norms) / mean(float(one.norm()) for one in gradients),
    }
    return {name: round(x, 5) if math.isfinite(x) else None for name, x in figures.items()}


def xi_sum(accumulated: Sequence[Tensor], gradients: Sequence[Tensor], k: int) -> float:
    """Return the ξ of SparCML's Assumption C.2, where the sum of the selections stays whole."""
    whole = topk(torch.stack(list(accumulated)).mean(0), k).to_dense()
    sums = torch.stack([topk(one, k).to_dense() for one in accumulated]).mean(0)
    return float((whole - sums).norm() / torch.stack(list(gradients)).mean(0).norm())


def _pairwise(cosines: Tensor) -> float:
    return mean(float(cosines[a, b]) for a, b in combinations(range(len(cosines)), 2))


def watch(data: Path, task: str, method: str, seed: int) -> Row:
    """Train once and return the row."""
    run = Watched(data, TASKS[task], METHODS[method], seed)
    sparcel.simulate(RANKS, run.rank)
    return {
        **METHODS[method].told(),
        "ranks": RANKS,
        "steps": run.task.steps,
        **evaluate(run.model, run.split),
        "selected": _in_parts([sent for sent, _ in run.counts]),
        "result": _in_parts([result for _, result in run.counts]),
        "selected_deviation": mean(abs(sent - 1) for sent, _ in run.counts),
        "result_deviation": mean(abs(result - 1) for _, result in run.counts),
        "growth": run.growth,
        "looks": run.found,
    }


def _in_parts(values: Sequence[float], parts: int = 20) -> list[float]:
    """Return the means of equal parts."""
    return [round(float(p.mean()), 4) for p in torch.tensor(values).tensor_split(parts)]


def main() -> None:
    told = runs_told(__doc__, "signals", tasks=among(TASKS, ["images", "characters"]), seed=0)
    run_all(told, watch, grid(task=told.tasks, method=METHODS, seed=[told.seed]))


if __name__ == "__main__":
    main()
