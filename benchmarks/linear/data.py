"""What the linear models' benchmarks share: text files, caches of their rows, and clocks."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from benchmarks.clock import took
from benchmarks.record import Row
from sparcel.core.comm import Communicator
from sparcel.products.linear.trainer import Examples
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


WORK = Path("build/linear")
"""Where files and caches are by default."""

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


def urls(data: Path, folder: Path) -> tuple[Rows, Rows]:
    """Return the URLs to train on and to test on; their files and caches are made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    make(data, folder, "urls")
    return rows_of(SETS["urls"], folder, "train"), rows_of(SETS["urls"], folder, "test")


def place_of(comm: Communicator | None) -> tuple[int, int]:
    """Return the rank, and the number of ranks."""
    return (0, 1) if comm is None else (comm.rank, comm.size)


def examples(rows: Rows, positive: str = "1") -> Examples:
    """Return rows with targets, of which those of one label are 1 and the others -1."""
    return Examples(rows, np.where(rows.labels == positive, 1, -1).astype(np.float32))


def matrix(rows: Rows) -> sp.csr_matrix:
    """Return rows as scipy has them."""
    return sp.csr_matrix((rows.values, rows.columns, rows.offsets), (len(rows), rows.dimensions))


def texts(rows: Rows, first: int, digits: int = 6) -> Iterator[tuple[str, str]]:
    """Yield each row's label and its entries as text; columns are counted from ``first``."""
    assert rows.labels is not None
    for i, label in enumerate(rows.labels):
        cut = slice(rows.offsets[i], rows.offsets[i + 1])
        pairs = zip((rows.columns[cut] + first).tolist(), rows.values[cut].tolist(), strict=True)
        yield label, " ".join(f"{column}:{value:.{digits}g}" for column, value in pairs)


def timed(call: Callable[[], object]) -> Row:
    """Return what a call takes, and how many processes wanted to run."""
    seconds, busy, _ = took(call)
    return {"seconds": seconds, "cpu_seconds": busy, "load": os.getloadavg()[0]}


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
