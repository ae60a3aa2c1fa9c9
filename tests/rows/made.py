"""Rows for tests, as arrays and as SVMlight text in many layouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import strategies as st

from sparcel.products.rows import Rows

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([-1.0, 0.0, 1.0])
TEXTS = st.text("abé,-", min_size=1)
VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.just(1.0)


@st.composite
def made(draw: st.DrawFn, labels: st.SearchStrategy[object], most: int = 12) -> Rows:
    """Draw rows with such labels."""
    dimensions = draw(st.integers(1, 30))
    columns = draw(st.lists(st.sets(st.integers(0, dimensions - 1), max_size=8), max_size=most))
    entries = sum(map(len, columns))
    found = draw(st.lists(labels, min_size=len(columns), max_size=len(columns)))
    return Rows(
        np.cumsum([0, *map(len, columns)], dtype=np.int64),
        np.array([column for row in columns for column in sorted(row)], np.int32),
        np.array(draw(st.lists(VALUES, min_size=entries, max_size=entries)), np.float32),
        dimensions,
        np.array(found, np.float64 if labels is NUMBERS else np.str_),
    )


@st.composite
def texts_of(draw: st.DrawFn, rows: Rows, index_from: int) -> bytes:
    """Draw a way to write rows."""
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)

    def any_of(*choices: str) -> str:
        return str(random.choice(choices))

    def written(number: np.float32 | np.float64) -> str:
        long = f"{float(number):.17g}"
        plus = "" if number < 0 or str(number).startswith("-") else any_of("", "+")
        return plus + any_of(str(number), repr(float(number)), long, long.replace("e", "E"))

    assert rows.labels is not None
    lines = []
    for label, start, stop in zip(rows.labels, rows.offsets, rows.offsets[1:], strict=False):
        text = any_of("", " ") + (written(label) if rows.labels.dtype.kind == "f" else str(label))
        for column, value in zip(rows.columns[start:stop], rows.values[start:stop], strict=True):
            text += any_of(" ", "\t", " \t ") + f"{column + index_from}:{written(value)}"
        lines.append(text + any_of("", "", " ", " # 1:2", "#", "\r"))
        lines += random.choice(["", " \t", "# 1 2:x"], random.integers(0, 2)).tolist()
    return ("\n".join(lines) + any_of("", "\n", "\n\n")).encode()


def same(one: Rows, other: Rows) -> bool:
    """Tell whether rows are equal in every array and dtype, but for the room of strings."""
    pairs = [
        (getattr(one, name), getattr(other, name)) for name in ("offsets", "columns", "values")
    ]
    assert one.labels is not None and other.labels is not None
    labels = one.labels.tolist() == other.labels.tolist()
    kinds = one.labels.dtype.kind == other.labels.dtype.kind
    alike = all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)
    return alike and labels and kinds and one.dimensions == other.dimensions


@contextmanager
def folder() -> Iterator[Path]:
    """Make a folder; Hypothesis needs one for each example."""
    with TemporaryDirectory() as name:
        yield Path(name)
