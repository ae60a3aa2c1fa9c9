"""Hashed n-grams: the rows of scikit-learn's HashingVectorizer, and columns beyond its reach."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import HashingVectorizer

from sparcel import _cpu
from sparcel.errors import InputError
from sparcel.products.rows import HashedNGrams, Rows, concatenate
from sparcel.products.rows.text import _classes

SPACES = " \t\n\r\v\f\x1c\x1f\x85\xa0\u2003\u2028\u3000"
MARKS = "\u0301\u0345\u200d"
LETTERS = "aAbz09_.-éÉßİıΣςſK߀日本ꯍ𝔸𝟗😀"
"""Of one to four bytes; some change their length or their neighbours when they are lowered."""

WIDE = 2**62

texts = st.one_of(
    st.text(st.sampled_from(LETTERS + SPACES + MARKS), max_size=30),
    st.text(st.sampled_from("ab_1 \t\n.") | st.sampled_from("ab"), max_size=60),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
)
documents = st.lists(texts, min_size=1, max_size=5)
ranges = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda pair: tuple(sorted(pair)))


@st.composite
def settings(draw: st.DrawFn, dimensions: tuple[int, ...]) -> HashedNGrams:
    return HashedNGrams(
        draw(st.sampled_from(["word", "char", "char_wb"])),
        draw(ranges),
        draw(st.sampled_from(dimensions)),
        *(draw(st.booleans()) for _ in range(3)),
        norm=draw(st.sampled_from(["l2", "l1", None])),
    )


def vectorizer(settings: HashedNGrams) -> HashingVectorizer:
    options = asdict(settings)
    return HashingVectorizer(n_features=options.pop("dimensions"), **options)


def assert_same(rows: Rows, offsets: Any, columns: Any, values: Any) -> None:
    """Compare all bits."""
    assert rows.offsets.dtype == np.int64
    assert rows.values.dtype == np.float32
    assert rows.offsets.tolist() == list(offsets)
    assert rows.columns.tolist() == list(columns)
    assert rows.values.tobytes() == np.asarray(values, np.float32).tobytes()


@given(settings((2, 3, 1000, 2**20, 2**31 - 1)), documents)
def test_rows_are_scikit_learns(settings: HashedNGrams, documents: list[str]) -> None:
    rows = settings.rows(documents)
    expected = vectorizer(settings).transform(documents)
    assert rows.columns.dtype == np.int32
    assert rows.dimensions == expected.shape[1]
    assert_same(rows, expected.indptr, expected.indices, expected.data)


@pytest.mark.parametrize("analyzer", ["word", "char", "char_wb"])
@pytest.mark.parametrize("text", [SPACES * 3, "x", "x y", " " * 5000, "ab" * 9000, "ab " * 5000])
def test_few_n_grams_many_times(analyzer: Any, text: str) -> None:
    settings = HashedNGrams(analyzer, (1, 3), 2**31 - 1)
    expected = vectorizer(settings).transform([text, ""])
    assert_same(settings.rows([text, ""]), expected.indptr, expected.indices, expected.data)


@pytest.mark.parametrize(("pattern", "kind"), [(r"\w", 1), (r"\s", 2)])
def test_every_code_point_is_what_python_takes_it_for(pattern: str, kind: int) -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    found = [ord(match) for match in re.findall(pattern, everything)]
    assert np.flatnonzero(_classes(len(everything)) == kind).tolist() == found


def murmur64(data: bytes) -> int:
    """Return the first 8 bytes of MurmurHash3's x64_128, from its definition, signed."""
    bits = 2**64 - 1
    one, two = 0x87C37B91114253D5, 0x4CF5AD432745937F

    def rotate(x: int, by: int) -> int:
        return (x << by | x >> 64 - by) & bits

    def avalanche(x: int) -> int:
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & bits
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & bits
        return x ^ x >> 33

    low = high = 0
    blocks = len(data) // 16
    for i, start in enumerate(range(0, len(data), 16)):
        a, b = (int.from_bytes(data[s : s + 8], "little") for s in (start, start + 8))
        if len(data) - start < 16:
            b = int.from_bytes(data[start + 8 :], "little")
        low ^= rotate(a * one & bits, 31) * two & bits
        if i < blocks:
            low = ((rotate(low, 27) + high) * 5 + 0x52DCE729) & bits
        high ^= rotate(b * two & bits, 33) * one & bits
        if i < blocks:
            high = ((rotate(high, 31) + low) * 5 + 0x38495AB5) & bits
    low, high = low ^ len(data), high ^ len(data)
    low = (low + high) & bits
    high = (high + low) & bits
    hashed = (avalanche(low) + avalanche(high)) & bits
    return hashed - 2**64 if hashed >> 63 else hashed


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("", 0),
        ("hello", 0xCBD8A7B341BD9B02),
        ("hello, world", 0x342FAC623A5EBC8E),
        ("19 Jan 2038 at 3:14:07 AM", 0xB89E5988B737AFFC),
        ("The quick brown fox jumps over the lazy dog.", 0xCD99481F9EE902C9),
    ],
)
def test_long_hash_has_its_published_values(text: str, published: int) -> None:
    assert murmur64(text.encode()) % 2**64 == published
    if text:
        units = len(text)
        settings = HashedNGrams("char", (units, units), WIDE, lowercase=False, norm=None)
        rows = settings.rows([text])
        signed = published - 2**64 if published >> 63 else published
        assert rows.columns.tolist() == [abs(signed) % WIDE]
        assert rows.values.tolist() == [-1 if signed < 0 else 1]


@given(settings((2**31, 2**31 + 11, 3 * 2**40, WIDE, 2**63 - 1)), documents)
def test_columns_beyond_int32_are_those_of_the_long_hash(
    settings: HashedNGrams, documents: list[str]
) -> None:
    offsets, columns, values = [0], [], []
    analyze = vectorizer(HashedNGrams(**{**asdict(settings), "dimensions": 2})).build_analyzer()
    for document in documents:
        row: Counter[int] = Counter()
        for ngram in analyze(document):
            hashed = murmur64(ngram.encode())
            row[abs(hashed) % settings.dimensions] += (
                -1 if settings.alternate_sign > (hashed >= 0) else 1
            )
        found = np.array([1 if settings.binary else row[at] for at in sorted(row)], np.float64)
        order = {"l1": 1, "l2": 2, None: None}[settings.norm]
        norm = 1 if order is None else np.linalg.norm(found, order)
        columns += sorted(row)
        values += list(found / (norm or 1))
        offsets.append(len(columns))
    rows = settings.rows(documents)
    assert rows.columns.dtype == np.int64
    assert_same(rows, offsets, columns, values)


@given(settings((2**20, 2**40)), st.integers(0, 2**32))
def test_any_number_of_threads_makes_the_same_bits(settings: HashedNGrams, seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = draw.choice([0, 3, 50, 4000], 60)
    documents = ["".join(draw.choice(list("abc é"), length)) for length in lengths]
    alone = settings.rows(documents, threads=1)
    for threads in (2, 5):
        rows = settings.rows(documents, threads=threads)
        assert_same(rows, alone.offsets, alone.columns, alone.values)


@pytest.mark.parametrize("threads", [1, 2])
def test_long_texts_are_hashed_in_rounds(threads: int) -> None:
    settings = HashedNGrams("char", (2, 2), 1000)
    documents = [f"{i} é" * (400 + i % 300) for i in range(1500)]
    expected = concatenate([settings.rows(documents[i : i + 100]) for i in range(0, 1500, 100)])
    rows = settings.rows(documents, threads=threads)
    assert sum(len(document.encode()) for document in documents) > 3 * 2**20
    assert_same(rows, expected.offsets, expected.columns, expected.values)


def test_labels_go_with_the_rows() -> None:
    rows = HashedNGrams().rows(["one text", "another"], labels=["a", "b"])
    assert len(rows) == 2
    assert rows.labels is not None
    assert rows.labels.tolist() == ["a", "b"]
    assert HashedNGrams().rows([], labels=[]).offsets.tolist() == [0]
    with pytest.raises(InputError, match="one per document, got shape \\(1,\\) for 2"):
        HashedNGrams().rows(["one", "two"], labels=[1])


def test_the_representation_makes_the_settings_again() -> None:
    settings = HashedNGrams("char", [3, 4], np.int64(100), norm=None)  # type: ignore[arg-type]
    assert eval(repr(settings)) == settings
    assert "ngram_range=(3, 4), dimensions=100" in repr(settings)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("text", "put it in a list"),
        (["a", b"b"], r"documents\[1\] must be a str, got bytes"),
        (["a", "b\ud800"], r"documents\[1\] has '\\ud800'"),
    ],
)
def test_documents_must_be_text(documents: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        HashedNGrams().rows(documents)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"analyzer": "chars"}, "did you mean 'char'"),
        ({"norm": "max"}, "norm.* cannot be 'max'; it must be one of l1, l2"),
        ({"ngram_range": 3}, "pair"),
        ({"ngram_range": (0, 3)}, "low end of ngram_range must lie in"),
        ({"ngram_range": (3, 2)}, "high end of ngram_range must lie in"),
        ({"dimensions": 1}, "dimensions"),
        ({"dimensions": 2**63}, "dimensions"),
        ({"binary": 1}, "binary must be True or False"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        HashedNGrams(**wrong)


@given(st.lists(st.binary(max_size=40), min_size=1), settings((3, 2**20, 2**40)))
def test_any_bytes_are_safe_to_the_kernel(parts: list[bytes], settings: HashedNGrams) -> None:
    ends = np.cumsum([0, *map(len, parts)])
    text = np.frombuffer(b"".join(parts), np.uint8)
    offsets, columns, _ = _cpu.hash_ngrams(
        text,
        ends,
        np.ones(300, np.uint8),
        settings.analyzer,
        *settings.ngram_range,
        settings.lowercase,
        settings.dimensions,
        settings.alternate_sign,
        settings.binary,
        settings.norm,
        1,
    )
    assert offsets[-1] == len(columns)
    for start, end in pairwise(offsets):
        row = columns[start:end]
        assert (np.diff(row) > 0).all()
        assert ((row >= 0) & (row < settings.dimensions)).all()


@pytest.mark.parametrize("offsets", [[], [-1, 2], [0, 4], [2, 1], [0, 2, 1, 3]])
def test_offsets_are_checked(offsets: list[int]) -> None:
    text, given = np.zeros(3, np.uint8), np.array(offsets, np.int64)
    with pytest.raises(ValueError, match="offsets"):
        _cpu.hash_ngrams(text, given, text, "word", 1, 1, True, 2, True, True, None, 1)
