"""Why sparse training ends worse: one switch at a time, and what each protection is worth.

    python -m benchmarks.training.causes DATA [--seeds 2] [--variants "k" "k, ahead"]

``DATA`` holds the folder ``fashion-mnist``. Eight ranks train a small CNN for two epochs at 1 %, in
one process: their memories are the rows of a matrix, so that a rule can be changed in a line. What
the schemes themselves do is measured by ``convergence.py``. Runs that the record has are not
repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

from benchmarks.record import Row, parser_for, run_all
from benchmarks.training.causes_rules import RANKS, VARIANTS, Exchange
from benchmarks.training.tasks import TASKS, batches, loss_of
from sparcel.core.training import stays_dense


def tiny_cnn() -> nn.Sequential:
    """Return a CNN of 26,826 parameters for 28×28 images."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16 * 49, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def train(data: Path, variant: str, seed: int) -> Row:
    """Train once with a variant and return its row."""
    torch.set_num_threads(1)
    rule, task = VARIANTS[variant], TASKS["clothes"]
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
        "rule": asdict(rule),
        "steps": task.steps,
        "accuracy": float((logits.argmax(1) == split.y_test).double().mean()),
        "loss": loss if math.isfinite(loss) else None,
        "dead_units": float((hidden.amax(0) <= 0).double().mean()),
        "update_norm_first_tenth": _finite(norms[: len(norms) // 10]),
        "update_norm": _finite(norms),
        "wait_steps": _finite(waits[len(waits) // 2 :]),
        "mean_density": exchange.sent / task.steps,
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
    parser = parser_for(__doc__, "causes")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds, from 0 on")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    told = parser.parse_args()
    every = product(range(told.seeds), told.variants)
    run_all(told, train, ({"variant": variant, "seed": seed} for seed, variant in every))


if __name__ == "__main__":
    main()
