"""Real training tasks for the convergence suite: data, model and the settings of dense training.

Every task classifies: inputs ``x``, targets ``y`` of one class a sample or a position, and a model
whose logits end in one value a class.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import sysconfig
import tarfile
import wave
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.training import models

VOCABULARY = 2000
UNKNOWN, PADDING = 0, 1
MOMENTUM = 0.9
MOST_BYTES = 4_000_000
"""What a language model of bytes has of its text."""
BYTES_A_WINDOW = 64


@dataclass(frozen=True)
class Split:
    """Samples to train on and samples held out: inputs and targets of each."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


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


@cache
def _fashion(folder: Path, seed: int) -> Split:
    parts = [
        _idx(folder / f"{use}-{what}-ubyte.gz")
        for use, what in product(("train", "t10k"), ("images-idx3", "labels-idx1"))
    ]
    x, y, x_test, y_test = parts
    x, x_test = x.flatten(1).float(), x_test.flatten(1).float()
    mean, deviation = x.mean(), x.std()
    return Split((x - mean) / deviation, y.long(), (x_test - mean) / deviation, y_test.long())


def _idx(file: Path) -> Tensor:
    """Read a file of MNIST's format: four bytes, the last the number of sizes; sizes; values."""
    content = gzip.decompress(file.read_bytes())
    values_at = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:values_at], ">i4")
    return torch.from_numpy(
        np.frombuffer(content, np.uint8, offset=values_at).reshape(shape).copy()
    )


@cache
def _cifar(folder: Path, seed: int) -> Split:
    decoded = [_images(folder / f"{part}.tar.xz") for part in ("train", "test")]
    (x_train, y_train), (x_test, y_test) = decoded
    return Split(x_train, y_train, x_test, y_test)


def _images(archive: Path) -> tuple[Tensor, Tensor]:
    pixels, names = [], []
    with tarfile.open(archive) as files:
        for member in files:
            if member.isfile() and member.name.endswith(".jpg"):
                content = files.extractfile(member)
                assert content is not None
                pixels.append(np.asarray(Image.open(io.BytesIO(content.read()))))
                names.append(member.name.split("/")[-2])
    classes = {name: place for place, name in enumerate(sorted(set(names)))}
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float()
    return (images - 120) / 64, torch.tensor([classes[name] for name in names])


@cache
def _shakespeare(folder: Path, seed: int) -> Split:
    text = "".join(_lines(folder / "input.txt.xz"))
    number = {letter: place for place, letter in enumerate(sorted(set(text)))}
    letters = torch.tensor([number[letter] for letter in text])
    cut = len(letters) * 9 // 10
    return _windows(letters[:cut], letters[cut:], 48)


@cache
def _wikitext(folder: Path, seed: int) -> Split:
    train, test = (_tokens(folder / f"{part}.txt.xz") for part in ("train", "test"))
    common = Counter(train).most_common(VOCABULARY - 1)
    number = {word: place + 1 for place, (word, _) in enumerate(common)}
    ids = [torch.tensor([number.get(word, UNKNOWN) for word in part]) for part in (train, test)]
    return _windows(ids[0], ids[1], 32)


def _tokens(file: Path) -> list[str]:
    return [word for line in _lines(file) for word in (*line.split(), "<eos>")]


def _windows(train: Tensor, test: Tensor, length: int) -> Split:
    """Cut sequences into windows; the target of a position is the token that follows."""
    parts = []
    for tokens in (train, test):
        count = (len(tokens) - 1) // length
        parts += [tokens[at : at + count * length].view(count, length) for at in (0, 1)]
    return Split(*parts)


@cache
def _reviews(folder: Path, seed: int) -> Split:
    rows = map(json.loads, _lines(folder / "train.jsonl.xz"))
    return _bytes("\n".join(row["text"] for row in rows))


@cache
def _articles(folder: Path, seed: int) -> Split:
    return _bytes("".join(_lines(folder / "train.txt.xz")))


@cache
def _news(folder: Path, seed: int) -> Split:
    rows = csv.reader(_lines(folder / "test.csv.xz", newline=""))
    return _bytes("\n".join(". ".join(row[1:]) for row in rows))


def _lines(file: Path, newline: str | None = None) -> Iterator[str]:
    with lzma.open(file, "rt", encoding="utf8", newline=newline) as lines:
        yield from lines


def _code(length: int) -> Callable[[Path, int], Split]:
    """Read the sources of Python's own library, in an order that is drawn once."""

    @cache
    def read(folder: Path, seed: int) -> Split:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
        files = [file for file in files if "site-packages" not in file.parts]
        Random(0).shuffle(files)
        return _bytes("\n".join(file.read_text("utf8", "replace") for file in files), length)

    return read


def _bytes(text: str, length: int = BYTES_A_WINDOW) -> Split:
    """Read a text as windows of bytes; the last twentieth is held out."""
    letters = torch.frombuffer(bytearray(text.encode()[:MOST_BYTES]), dtype=torch.uint8).long()
    cut = len(letters) * 19 // 20
    return _windows(letters[:cut], letters[cut:], length)


@cache
def _digits(folder: Path, seed: int) -> Split:
    """Read spoken digits; of each speaker and digit the fold ``seed % 5`` is held out."""
    spectra, labels, held_out = [], [], []
    with tarfile.open(folder / "recordings.tar.xz") as files:
        for member in files:
            if not member.name.endswith(".wav"):
                continue
            content = files.extractfile(member)
            assert content is not None
            digit, _, index = Path(member.name).stem.split("_")
            spectra.append(_spectrum(content.read()))
            labels.append(int(digit))
            held_out.append(int(index) % 5 == seed % 5)
    x, y, test = torch.stack(spectra), torch.tensor(labels), torch.tensor(held_out)
    x = (x - x[~test].mean()) / x[~test].std()
    return Split(x[~test], y[~test], x[test], y[test])


def _spectrum(content: bytes) -> Tensor:
    """Return the log power of the first 0.768 s in 32 bands, ``[1, 32, 48]``."""
    with wave.open(io.BytesIO(content)) as recording:
        samples = np.frombuffer(recording.readframes(recording.getnframes()), np.int16)
    sound = torch.zeros(6144)
    sound[: min(len(samples), 6144)] = torch.from_numpy(samples[:6144].astype(np.float32)) / 32768
    window = torch.hann_window(256)
    power = torch.stft(sound, 256, 128, window=window, return_complex=True).abs().square()
    return torch.log(power[1:, :48].view(32, 4, 48).mean(1) + 1e-6)[None]


@cache
def _snips(folder: Path, seed: int) -> Split:
    """Read utterances as word numbers; a sixth of them, 2,414, is held out."""
    files = (folder / f"{part}.jsonl.xz" for part in ("train", "valid"))
    rows = [json.loads(line) for file in files for line in _lines(file)]
    intents_of = sorted({row["intent"] for row in rows})
    sentences = ["".join(text for text, _ in row["data"]).lower().split() for row in rows]
    test = torch.arange(len(rows)) % 6 == 0
    seen = Counter(
        word for row, out in zip(sentences, test, strict=True) if not out for word in row
    )
    known = [word for word, times in seen.most_common() if times > 1]
    number = {word: place + 2 for place, word in enumerate(known)}
    x = torch.full((len(rows), 20), PADDING)
    for row, words in enumerate(sentences):
        ids = [number.get(word, UNKNOWN) for word in words[:20]]
        x[row, : len(ids)] = torch.tensor(ids)
    y = torch.tensor([intents_of.index(row["intent"]) for row in rows])
    return Split(x[~test], y[~test], x[test], y[test])


def _classes(split: Split) -> int:
    return 1 + int(split.y_train.max())


SGD_TASKS = (
    Task("clothes", "fashion-mnist", _fashion, lambda _: models.small_cnn(), kind="vision"),
    Task("images", "cifar-10-jpeg", _cifar, lambda _: models.residual_network(), kind="vision"),
    Task(
        *("batchnorm", "cifar-10-jpeg", _cifar, lambda _: models.residual_network(nn.BatchNorm2d)),
        kind="vision",
    ),
    Task(
        *(
            "characters",
            "tinyshakespeare",
            _shakespeare,
            lambda split: models.Characters(_classes(split)),
        ),
        lr=2.0,
        clip=1.0,
    ),
    Task("speech", "fsdd", _digits, lambda _: models.spectrogram_cnn(), kind="speech"),
    Task(
        *(
            "intents",
            "snips-nlu",
            _snips,
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
    *("words", "wikitext-2", _wikitext, _of_words(64, 2), 16, 2000, 4e-3), adamw={}, clip=1.0
)
_ARTICLES = Task(
    *("articles", "wikitext-2", _articles, _of_bytes(80, 4), 32, 1500, 3e-3),
    adamw={"betas": (0.9, 0.95), "weight_decay": 0.1},
    clip=1.0,
    lr_end=0.1,
)
_CODE = replace(
    _ARTICLES,
    name="code",
    folder="",
    read=_code(128),
    model=_of_bytes(160, 4, 128),
    batch=16,
    steps=600,
    lr=1e-3,
    clip=None,
)
_LONG = replace(_CODE, read=_code(256), batch=256, steps=800, lr=1e-3)
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
        read=_reviews,
        model=_of_bytes(96, 3),
        steps=1000,
        lr_end=0.0,
        muon=True,
    ),
    replace(
        _ARTICLES,
        name="news",
        folder="ag-news-test",
        read=_news,
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
