"""Real training tasks for the convergence suite: data, model and the settings of dense training.

Every task classifies: inputs ``x``, targets ``y`` of one class a sample or a position, and a model
whose logits end in one value a class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training import datasets, models
from benchmarks.training.datasets import BYTES_A_WINDOW, VOCABULARY, Split

MOMENTUM = 0.9


@dataclass(frozen=True)
class Task:
    """A training that all schemes do alike.

    Attributes
    ----------
    read
        ``(folder, seed) -> split``; the seed chooses the fold where a task is cross-validated.
    model
        ``split -> model``.
    batch, steps
        Samples of a step on all ranks together; optimiser steps of the training.
    lr
        The largest learning rate. It rises linearly for a twentieth of the steps.
    adamw
        The settings of AdamW, if that trains the model; else SGD with momentum 0.9.
    clip
        The largest norm of the update, if that is clipped.
    lr_end
        What the learning rate falls to, linearly, as a share of the largest.
    kind
        What is learnt.
    muon
        Whether Muon trains the matrices inside of the model's layers, and AdamW the others.
    after
        The task that trained the model before, densely, if there is one.
    """

    name: str
    folder: str
    read: Callable[[Path, int], Split]
    model: Callable[[Split], nn.Module]
    batch: int = 64
    steps: int = 2000
    lr: float = 0.05
    adamw: Mapping[str, Any] | None = None
    clip: float | None = None
    lr_end: float = 0.0
    kind: str = "language"
    muon: bool = False
    after: str | None = None

    @property
    def optimizer(self) -> str:
        """What trains the matrices of the layers."""
        if self.muon:
            return "Muon"
        return "SGD" if self.adamw is None else "AdamW"

    def optimizers(
        self, model: nn.Module, without_momentum: Collection[str] = ()
    ) -> list[torch.optim.Optimizer]:
        named = dict(model.named_parameters())

        def those(names: Iterable[str]) -> list[nn.Parameter]:
            return [named[name] for name in named if name in names]

        if self.adamw is None:
            groups = [
                {"params": those(without_momentum), "momentum": 0.0},
                {"params": those(named.keys() - without_momentum)},
            ]
            return [torch.optim.SGD(groups, lr=self.lr, momentum=MOMENTUM)]
        matrices = {n for n, p in named.items() if n.startswith("layers.") and p.ndim == 2}
        if not self.muon:
            return [torch.optim.AdamW(named.values(), lr=self.lr, **self.adamw)]
        return [
            torch.optim.Muon(those(matrices), lr=self.lr, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(those(named.keys() - matrices), lr=self.lr, **self.adamw),
        ]

    def update(
        self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], step: int
    ) -> bool:
        """Change a model by its gradients, and tell whether they were clipped."""
        clipped = False
        if self.clip is not None:
            clipped = bool(nn.utils.clip_grad_norm_(model.parameters(), self.clip) > self.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr_at(step)
            optimizer.step()
        return clipped

    def lr_at(self, step: int) -> float:
        ramp = max(1, self.steps // 20)
        left = (self.steps - step) / (self.steps - ramp)
        return self.lr * min((step + 1) / ramp, self.lr_end + (1 - self.lr_end) * left)


def batches(samples: int, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Yield the samples of each step: epochs in random order, incomplete batches left out."""
    order = torch.Generator().manual_seed(seed)
    while steps > 0:
        for chosen in torch.randperm(samples, generator=order).split(batch):
            if len(chosen) == batch and steps > 0:
                steps -= 1
                yield chosen


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _classes(split: Split) -> int:
    return 1 + int(split.y_train.max())


SGD_TASKS = (
    Task("clothes", "fashion-mnist", datasets.fashion, lambda _: models.small_cnn(), kind="vision"),
    Task(
        "images",
        "cifar-10-jpeg",
        datasets.cifar,
        lambda _: models.residual_network(),
        kind="vision",
    ),
    Task(
        *(
            "batchnorm",
            "cifar-10-jpeg",
            datasets.cifar,
            lambda _: models.residual_network(nn.BatchNorm2d),
        ),
        kind="vision",
    ),
    Task(
        *(
            "characters",
            "tinyshakespeare",
            datasets.shakespeare,
            lambda split: models.Characters(_classes(split)),
        ),
        lr=2.0,
        clip=1.0,
    ),
    Task("speech", "fsdd", datasets.digits, lambda _: models.spectrogram_cnn(), kind="speech"),
    Task(
        *(
            "intents",
            "snips-nlu",
            datasets.snips,
            lambda split: models.intents(2 + int(split.x_train.max())),
        ),
        lr=0.1,
        kind="intents",
    ),
)


def _of_words(width: int, layers: int) -> Callable[[Split], nn.Module]:
    return lambda _: models.Words(VOCABULARY, 32, width, layers)


def _of_bytes(
    width: int, layers: int, length: int = BYTES_A_WINDOW
) -> Callable[[Split], nn.Module]:
    return lambda _: models.Words(256, length, width, layers)


_WORDS = Task(
    *("words", "wikitext-2", datasets.wikitext, _of_words(64, 2), 16, 2000, 4e-3),
    adamw={},
    clip=1.0,
)
_ARTICLES = Task(
    *("articles", "wikitext-2", datasets.articles, _of_bytes(80, 4), 32, 1500, 3e-3),
    adamw={"betas": (0.9, 0.95), "weight_decay": 0.1},
    clip=1.0,
    lr_end=0.1,
)
_CODE = replace(
    _ARTICLES,
    name="code",
    folder="",
    read=datasets.code(128),
    model=_of_bytes(160, 4, 128),
    batch=16,
    steps=600,
    lr=1e-3,
    clip=None,
)
_LONG = replace(_CODE, read=datasets.code(256), batch=256, steps=800, lr=1e-3)
_CODES = (
    _CODE,
    replace(_CODE, name="code 6M", model=_of_bytes(320, 5, 128), batch=32, steps=400, lr=1e-3),
    replace(_LONG, name="code 25M", model=_of_bytes(512, 8, 256)),
    replace(_LONG, name="code 100M", model=_of_bytes(1024, 8, 256)),
)
_MUON_RATES = zip(_CODES, (2e-3, 1e-3, 1e-3, 1e-3), strict=True)
ADAM_TASKS = (
    *_CODES,
    *(replace(task, name=f"{task.name}, Muon", lr=lr, muon=True) for task, lr in _MUON_RATES),
    _WORDS,
    replace(_WORDS, name="medium words", model=_of_words(160, 3), steps=600, lr=1e-3),
    replace(_WORDS, name="wide words", model=_of_words(320, 4), steps=400, lr=1e-3),
    _ARTICLES,
    replace(
        _ARTICLES,
        name="reviews",
        folder="imdb-subset",
        read=datasets.reviews,
        model=_of_bytes(96, 3),
        steps=1000,
        lr_end=0.0,
        muon=True,
    ),
    replace(
        _ARTICLES,
        name="news",
        folder="ag-news-test",
        read=datasets.news,
        steps=800,
        lr=1e-4,
        adamw={},
        lr_end=1.0,
        after="articles",
    ),
)

TASKS = {task.name: task for task in (*SGD_TASKS, *ADAM_TASKS)}
"""All tasks, by name. What protects training was tuned on ``clothes``, which is not judged;
``batchnorm`` is ``images`` with batch norms, which take the samples of one rank; ``medium words``
and ``wide words`` are ``words`` with models of 1.3 and 5.6 million parameters, for trainings over
links. ``code`` trains language models of bytes on the sources of Python's library, of 1.3 million
parameters and more, with few samples a rank and a high rate; 25 and 100 million ask for a GPU. The
last three are language models of bytes, unlike the tasks that defaults were chosen on: ``reviews``
is trained by Muon, ``articles`` by AdamW with a shorter memory and weight decay, and ``news``
fine-tunes the model of ``articles`` at a constant rate."""
