"""Why sparse training ends worse: one switch at a time, and what each protection is worth.

    python benchmarks/causes.py DATA [--seeds 2] [--variants "k" "k, ahead"]

``DATA`` holds the folder ``fashion-mnist``. Eight ranks train a small CNN for two epochs at 1 %, in
one process: their memories are the rows of a matrix, so that a rule can be changed in a line. What
the schemes themselves do is measured by ``convergence.py``. Runs that the record has are not
repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from machine import machine
from rich.console import Console
from tasks import MOMENTUM, TASKS, batches, loss_of
from torch import Tensor, nn

from sparcel.schemes import front_loaded
from sparcel.selectors import topk
from sparcel.training import stays_dense

RANKS = 8
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Rule:
    """What happens between gradients and update.

    Attributes
    ----------
    result
        ``"dense"``; ``"union"``: all that some rank selects is applied (topk, sparcml); ``"k"``:
        the k largest sums of that (gtopk, oktopk); ``"leader"``: what one rank selects (scalecom).
    per
        From what a rank selects: ``"vector"``, ``"layer"``, or runs of that many coordinates.
    density, front, dense_first, dense_last
        Share that is selected; whether `front_loaded`; how many steps are dense at either end.
    delay
        How many steps later a dense gradient is applied.
    memory, decay, beta
        Whether there is one; what it is multiplied by in each step; its low-pass filter.
    correction, masked
        Momentum before the memory instead of after it; whether what was sent loses its velocity.
    cap
        The largest release, in mean magnitudes of the ranks' gradients; the rest waits on.
    momentum
        The optimiser's.
    ahead
        Gradients are computed where ``ahead·lr·memory`` is applied.
    """

    result: str = "k"
    per: str = "vector"
    density: float = 0.01
    front: bool = False
    dense_first: int = 0
    dense_last: int = 0
    delay: int = 0
    memory: bool = True
    decay: float = 1.0
    beta: float = 1.0
    correction: float = 0.0
    masked: bool = True
    cap: float | None = None
    momentum: float = MOMENTUM
    ahead: float = 0.0


_DENSE, _K = Rule("dense"), Rule()
_TOPK, _SPARCML, _SCALECOM = Rule("union"), Rule("union", "512"), Rule("leader", "100")

VARIANTS: dict[str, Rule] = {
    "dense": _DENSE,
    "dense, 4 steps late": replace(_DENSE, delay=4),
    "dense, 16 steps late": replace(_DENSE, delay=16),
    "dense, without momentum": replace(_DENSE, momentum=0.0),
    "topk": _TOPK,
    "sparcml": _SPARCML,
    "k": _K,
    "scalecom": _SCALECOM,
    "k, without memory": replace(_K, memory=False),
    "k, memory decays by 0.95": replace(_K, decay=0.95),
    "k, momentum before memory": replace(_K, correction=MOMENTUM, masked=False),
    "k, momentum before memory, masked": replace(_K, correction=MOMENTUM),
    "k, without momentum": replace(_K, momentum=0.0),
    "k, releases capped at 8": replace(_K, cap=8.0),
    "k, by layer": replace(_K, per="layer"),
    "k, by bucket of 512": replace(_K, per="512"),
    "k, by chunk of 100": replace(_K, per="100"),
    "scalecom, over the vector": replace(_SCALECOM, per="vector"),
    "scalecom, β=0.1": replace(_SCALECOM, beta=0.1),
    "k, first 5 % dense": replace(_K, dense_first=94),
    "k, last 25 % dense": replace(_K, dense_last=468),
    "k, density 3 %": replace(_K, density=0.03),
    "k, front-loaded": replace(_K, front=True),
    "topk, ahead": replace(_TOPK, ahead=1.0),
    "sparcml, ahead": replace(_SPARCML, ahead=1.0),
    "k, ahead": replace(_K, ahead=1.0),
    "k, ahead by 3": replace(_K, ahead=3.0),
    "k, ahead by 10": replace(_K, ahead=10.0),
    "scalecom, ahead": replace(_SCALECOM, ahead=1.0),
    "scalecom β=0.1, ahead": replace(_SCALECOM, beta=0.1, ahead=1.0),
    "scalecom β=0.1, ahead by 10": replace(_SCALECOM, beta=0.1, ahead=10.0),
    "topk, both": replace(_TOPK, ahead=1.0, front=True),
    "sparcml, both": replace(_SPARCML, ahead=1.0, front=True),
    "k, both": replace(_K, ahead=1.0, front=True),
    "scalecom, both": replace(_SCALECOM, ahead=1.0, front=True),
}
"""``both``: ahead and front-loaded, which is what `sparcel.attach` does."""


class Exchange:
    """The memories of all ranks, a row each, and what a step makes of them."""

    def __init__(self, rule: Rule, sizes: list[int], steps: int) -> None:
        self.rule, self.sizes, self.steps = rule, sizes, steps
        size = sum(sizes)
        self.memory, self.velocity = torch.zeros(RANKS, size), torch.zeros(RANKS, size)
        self.late: deque[Tensor] = deque()
        self.step, self.sent = 0, 0.0

    def update(self, gradients: Tensor) -> Tensor:
        """Return the update of gradients ``[ranks, size]``."""
        rule, step = self.rule, self.step
        self.step += 1
        if rule.result == "dense":
            self.sent += 1
            self.late.append(gradients.mean(0))
            return torch.zeros_like(self.late[0]) if step < rule.delay else self.late.popleft()
        entering = gradients
        if rule.correction:
            entering = self.velocity.mul_(rule.correction).add_(gradients)
        before = self.memory
        waiting = entering + rule.decay * before if rule.memory else entering.clone()
        chosen = self._applied(waiting)
        update = (waiting * chosen).mean(0)
        kept = waiting.masked_fill(chosen, 0)
        if rule.cap is not None:
            share = (rule.cap * entering.abs().mean(0) / update.abs().clamp_min(1e-20)).clamp_max(1)
            kept += waiting * chosen * (1 - share)
            update = update * share
        self.memory = kept if rule.beta == 1 else torch.lerp(before, kept, rule.beta)
        if rule.correction and rule.masked:
            self.velocity.masked_fill_(chosen, 0)
        return update

    def _applied(self, waiting: Tensor) -> Tensor:
        """Return which coordinates of each rank are applied, ``[ranks, size]``."""
        density = self._density()
        self.sent += density
        if density == 1:
            return torch.ones_like(waiting, dtype=torch.bool)
        if self.rule.result == "leader":
            leader = waiting[(self.step - 1) % RANKS]
            return self._selected(leader, density).expand(RANKS, -1)
        selected = torch.stack([self._selected(rank, density) for rank in waiting])
        if self.rule.result == "union":
            return selected
        sums = (waiting * selected).sum(0)
        return selected & _largest(sums, math.ceil(density * len(sums)))

    def _density(self) -> float:
        rule, step = self.rule, self.step - 1
        if step < rule.dense_first or step >= self.steps - rule.dense_last:
            return 1.0
        return front_loaded(rule.density, step) if rule.front else rule.density

    def _selected(self, vector: Tensor, density: float) -> Tensor:
        if self.rule.per == "vector":
            return _largest(vector, math.ceil(density * len(vector)))
        if self.rule.per == "layer":
            parts = vector.split(self.sizes)
            return torch.cat([_largest(one, math.ceil(density * len(one))) for one in parts])
        width = int(self.rule.per)
        rows = nn.functional.pad(vector.abs(), (0, -len(vector) % width)).view(-1, width)
        highest = rows.topk(max(1, round(density * width)), 1)
        chosen = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, highest.indices, True)
        return chosen.flatten()[: len(vector)] & (vector != 0)


def _largest(vector: Tensor, k: int) -> Tensor:
    chosen = torch.zeros_like(vector, dtype=torch.bool)
    indices = topk(vector, k).indices
    assert indices is not None, "selections are sparse"
    chosen[indices.long()] = True
    return chosen


def tiny_cnn() -> nn.Sequential:
    """Return a CNN of 26,826 parameters for 28×28 images."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16 * 49, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def train(data: Path, label: str, seed: int) -> dict[str, Any]:
    """Train once with a variant and return its row."""
    torch.set_num_threads(1)
    start, rule, task = time.perf_counter(), VARIANTS[label], TASKS["clothes"]
    split = task.read(data / task.folder, seed)
    samples = len(split.y_train)
    task = replace(task, steps=2 * (samples // task.batch))
    torch.manual_seed(seed)
    model = tiny_cnn()
    named = dict(model.named_parameters())
    large = [p for name, p in named.items() if not stays_dense(name, p)]
    small = [p for name, p in named.items() if stays_dense(name, p)]
    groups = [
        {"params": small},
        {"params": large, "momentum": 0.0 if rule.correction else rule.momentum},
    ]
    optimizer = torch.optim.SGD(groups, lr=task.lr, momentum=rule.momentum)
    exchange = Exchange(rule, [p.numel() for p in large], task.steps)
    norms, waits = [], []
    for step, batch in enumerate(batches(samples, task.batch, task.steps, seed)):
        lr = task.lr_at(step)
        of_small, of_large = [], []
        for rank, part in enumerate(batch.chunk(RANKS)):
            with moved(large, exchange.memory[rank] * (rule.ahead * lr)):
                loss = loss_of(model, split.x_train[part], split.y_train[part])
                found = torch.autograd.grad(loss, small + large)
            of_small.append(flat(found[: len(small)]))
            of_large.append(flat(found[len(small) :]))
        update = exchange.update(torch.stack(of_large))
        assign(large, update)
        assign(small, torch.stack(of_small).mean(0))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        norms.append(float(update.norm()))
        taken = float(update.abs().sum())
        waits.append(float(exchange.memory.mean(0).abs().sum()) / taken if taken else 0.0)
    with torch.no_grad():
        logits = model(split.x_test)
        hidden = model[:-1](split.x_test)
    loss = float(nn.functional.cross_entropy(logits, split.y_test))
    return {
        "variant": label,
        "rule": asdict(rule),
        "seed": seed,
        "steps": task.steps,
        "accuracy": float((logits.argmax(1) == split.y_test).double().mean()),
        "loss": loss if math.isfinite(loss) else None,
        "dead_units": float((hidden.amax(0) <= 0).double().mean()),
        "update_norm_first_tenth": _finite(norms[: len(norms) // 10]),
        "update_norm": _finite(norms),
        "wait_steps": _finite(waits[len(waits) // 2 :]),
        "mean_density": exchange.sent / task.steps,
        "minutes": round((time.perf_counter() - start) / 60, 2),
    }


@contextmanager
def moved(parameters: list[nn.Parameter], by: Tensor) -> Iterator[None]:
    """Subtract a vector from parameters inside the block."""
    saved = [parameter.data for parameter in parameters]
    for parameter, part in zip(parameters, by.split([p.numel() for p in parameters]), strict=True):
        parameter.data = parameter.data - part.view(parameter.shape)
    yield
    for parameter, data in zip(parameters, saved, strict=True):
        parameter.data = data


def flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def assign(parameters: list[nn.Parameter], update: Tensor) -> None:
    parts = update.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view(parameter.shape)


def _finite(values: list[float]) -> float | None:
    average = mean(values)
    return average if math.isfinite(average) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder that holds fashion-mnist")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds, from 0 on")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results/causes.json"
    )
    arguments = parser.parse_args()
    output, console, data = arguments.output, Console(highlight=False), arguments.data.resolve()
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    done = {(row["variant"], row["seed"]) for row in rows}
    wanted = [(one, seed) for seed in range(arguments.seeds) for one in arguments.variants]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        runs = [pool.submit(train, data, *one) for one in wanted if one not in done]
        for run in as_completed(runs):
            rows.append(run.result())
            document = {**machine(), "rows": rows}
            output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            row = rows[-1]
            console.print(f"{row['variant']}, seed {row['seed']}: {row['accuracy']:.2%}")


if __name__ == "__main__":
    main()
