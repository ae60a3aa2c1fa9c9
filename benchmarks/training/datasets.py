"""The sets that tasks read: samples to train on and samples held out.

A reader takes the folder of its set, and a seed, which chooses the fold that is held out, if any.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image
from torch import Tensor

VOCABULARY = 2000
UNKNOWN, PADDING = 0, 1
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


@cache
def fashion(folder: Path, seed: int) -> Split:
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
def cifar(folder: Path, seed: int) -> Split:
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
def shakespeare(folder: Path, seed: int) -> Split:
    text = "".join(_lines(folder / "input.txt.xz"))
    number = {letter: place for place, letter in enumerate(sorted(set(text)))}
    letters = torch.tensor([number[letter] for letter in text])
    cut = len(letters) * 9 // 10
    return _windows(letters[:cut], letters[cut:], 48)


@cache
def wikitext(folder: Path, seed: int) -> Split:
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
def reviews(folder: Path, seed: int) -> Split:
    rows = map(json.loads, _lines(folder / "train.jsonl.xz"))
    return _bytes("\n".join(row["text"] for row in rows))


@cache
def articles(folder: Path, seed: int) -> Split:
    return _bytes("".join(_lines(folder / "train.txt.xz")))


@cache
def news(folder: Path, seed: int) -> Split:
    rows = csv.reader(_lines(folder / "test.csv.xz", newline=""))
    return _bytes("\n".join(". ".join(row[1:]) for row in rows))


def _lines(file: Path, newline: str | None = None) -> Iterator[str]:
    with lzma.open(file, "rt", encoding="utf8", newline=newline) as lines:
        yield from lines


def code(length: int) -> Callable[[Path, int], Split]:
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
def digits(folder: Path, seed: int) -> Split:
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
def snips(folder: Path, seed: int) -> Split:
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
