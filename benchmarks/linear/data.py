"""The data of the linear models' benchmarks: text files, and caches of their rows."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparcel.products.rows import HashedNGrams, Rows, Text, load, make_cache, save


@dataclass(frozen=True)
class Set:
    """A set of labelled texts.

    Attributes
    ----------
    ngrams
        What rows are made of.
    epochs
        How many are timed.
    """

    name: str
    ngrams: HashedNGrams
    epochs: int

    def file(self, folder: Path, part: str) -> Path:
        """Return the file of a part: train, test, or what else there is to test on."""
        return folder / f"{self.name}-{part}.tsv"

    def cache(self, folder: Path, part: str) -> Path:
        """Return the cache of a part's rows; ``train-compact`` numbers the columns that occur."""
        return folder / f"{self.name}-{part}.rows"


SETS = {
    one.name: one
    for one in (
        Set("urls", HashedNGrams("char", (3, 4), 3_231_961), 5),
        Set("posts-reviews", HashedNGrams("char", (3, 3), 16_609_143), 10),
    )
}


def make(data: Path, folder: Path, name: str) -> list[str]:
    """Write files and caches of a set, unless they are there; return the parts to test on."""
    one = SETS[name]
    parts = _urls(data) if name == "urls" else _posts_and_reviews(data)
    tests = []
    for part, rows in parts:
        file = one.file(folder, part)
        if not file.exists():
            file.write_text("".join(["label\ttext\n", *(f"{a}\t{b}\n" for a, b in rows)]))
        make_cache(one.cache(folder, part), file, Text("tsv", one.ngrams))
        tests += [] if part == "train" else [part]
    _make_compact(one, folder)
    return tests


def rows_of(one: Set, folder: Path, part: str) -> Rows:
    """Return the rows of a part, mapped from their cache."""
    rows = load(one.cache(folder, part))
    assert rows is not None
    return rows


def _urls(data: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    with lzma.open(data / "urls/urls.tsv.xz", "rt", encoding="utf8", newline="\n") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    pairs = [(row[0], row[3]) for row in rows]
    cut = len(pairs) * 9 // 10
    yield "train", pairs[:cut]
    yield "test", pairs[cut:]


def _posts_and_reviews(data: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    sets = {"post": "20newsgroups", "review": "imdb-subset"}
    texts = {}
    for label, folder in sets.items():
        for part in ("train", "test"):
            with lzma.open(data / folder / f"{part}.jsonl.xz", "rt", encoding="utf8") as file:
                lines = [" ".join(json.loads(line)["text"].split()) for line in file]
            texts[label, part] = [(label, text) for text in lines]
    train = texts["post", "train"] + texts["review", "train"]
    yield "train", [train[i] for i in np.random.default_rng(0).permutation(len(train))]
    yield "test-post", texts["post", "test"]
    yield "test-review", texts["review", "test"]


def _make_compact(one: Set, folder: Path) -> None:
    compact = one.cache(folder, "train-compact")
    if compact.exists():
        return
    rows = rows_of(one, folder, "train")
    occurring, columns = np.unique(rows.columns, return_inverse=True)
    values = (rows.offsets, columns.astype(np.int32), rows.values, len(occurring), rows.labels)
    save(compact, Rows(*values), "compact")
