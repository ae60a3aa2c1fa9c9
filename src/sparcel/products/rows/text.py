"""Rows of hashed n-grams, from documents, and documents and labels from lines of text files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sparcel import _cpu
from sparcel.core._checks import checked_flag, checked_whole
from sparcel.errors import InputError, checked_name
from sparcel.products.rows.rows import Rows

MOST_DIMENSIONS = 2**63 - 1
MOST_UNITS = 2**31 - 1
ASCII = 128


@dataclass(frozen=True)
class HashedNGrams:
    """Counts of the n-grams of documents, in columns that a hash of the n-gram chooses.

    Settings mean what they mean for scikit-learn's ``HashingVectorizer``, and rows are its rows,
    rounded to float32. The representation of this object is short and tells all settings, so a
    cache can store it to know its rows again.

    Attributes
    ----------
    analyzer
        What n-grams consist of: ``"word"``, of two or more letters, digits or underscores;
        ``"char"``, with runs of white space as one space; or ``"char_wb"``, characters inside words
        that have a space on either side.
    ngram_range
        The units in the shortest and in the longest n-grams.
    dimensions
        Number of columns, from 2 to 2**63 - 1. Up to 2**31 - 1 the column is ``abs(h)``
        modulo ``dimensions``, where h is MurmurHash3 (x86_32, seed 0) of the n-gram in UTF-8, as a
        signed integer. Beyond that, which is more than scikit-learn has, h is the first 8 bytes of
        MurmurHash3 (x64_128, seed 0).
    lowercase
        Whether documents are converted by `str.lower`.
    alternate_sign
        Whether an n-gram counts -1 where h is negative, so that n-grams that share a column cancel
        on average. An entry that becomes zero stays an entry.
    binary
        Whether every entry is 1, before it is divided by the norm.
    norm
        What each row is divided by: its ``"l2"`` norm, its ``"l1"`` norm, or None.
    """

    analyzer: Literal["word", "char", "char_wb"] = "word"
    ngram_range: tuple[int, int] = (1, 1)
    dimensions: int = 2**20
    lowercase: bool = True
    alternate_sign: bool = True
    binary: bool = False
    norm: Literal["l1", "l2"] | None = "l2"

    def __post_init__(self) -> None:
        checked_name(self.analyzer, ("word", "char", "char_wb"), "analyzer")
        if self.norm is not None:
            checked_name(self.norm, ("l1", "l2"), "norm, unless it is None,")
        most = MOST_DIMENSIONS
        plain: dict[str, object] = {
            "ngram_range": _checked_range(self.ngram_range),
            "dimensions": checked_whole(self.dimensions, "dimensions", at_least=2, at_most=most),
        }
        for name in ("lowercase", "alternate_sign", "binary"):
            plain[name] = checked_flag(getattr(self, name), name)
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def rows(
        self, documents: Sequence[str], labels: ArrayLike | None = None, threads: int | None = None
    ) -> Rows:
        """Make one row for each document.

        Parameters
        ----------
        documents
            Texts; an empty one makes an empty row.
        labels
            One per document, or None.
        threads
            At most so many threads are used, by default as many as torch uses. The rows have the
            same bits for any number.

        Returns
        -------
        Rows
            float32 values, and columns int32 or, beyond 2**31 - 1 dimensions, int64.

        Raises
        ------
        InputError
            When a document is no text that UTF-8 can hold, or labels do not fit the documents.
        """
        if threads is None:
            threads = torch.get_num_threads()
        threads = checked_whole(threads, "threads", at_least=1, at_most=2**31 - 1)
        found, count = None if labels is None else np.asarray(labels), len(documents)
        if found is not None and found.shape != (count,):
            raise InputError(
                f"labels must be one per document, got shape {found.shape} for {count} documents"
            )
        parts = _encoded(documents, self.lowercase)
        text = np.frombuffer(b"".join(parts), np.uint8)
        ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
        ascii_only = text.size == 0 or int(text.max()) < ASCII
        bounds = np.concatenate([np.zeros(1, np.int64), ends])
        classes = _classes(ASCII if ascii_only else sys.maxunicode + 1)
        low, high = self.ngram_range
        offsets, columns, values = _cpu.hash_ngrams(
            *(text, bounds, classes, self.analyzer, low, high, self.lowercase, self.dimensions),
            *(self.alternate_sign, self.binary, self.norm, threads),
        )
        return Rows(offsets, columns, values, self.dimensions, found)


def _checked_range(given: object) -> tuple[int, int]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"ngram_range must be a pair (low, high), got {given!r}")
    low = checked_whole(given[0], "the low end of ngram_range", at_least=1, at_most=MOST_UNITS)
    high = checked_whole(given[1], "the high end of ngram_range", at_least=low, at_most=MOST_UNITS)
    return low, high


def _encoded(documents: Sequence[str], lowercase: bool) -> list[bytes]:
    """Return the documents in UTF-8; the kernel lowers ASCII, all else is lowered here."""
    if isinstance(documents, str):
        raise InputError("documents must be a sequence of texts, got one text; put it in a list")
    encoded = []
    for document in documents:
        try:
            if lowercase and not document.isascii():
                document = document.lower()
            encoded.append(document.encode())
        except AttributeError:
            raise InputError(
                f"documents[{len(encoded)}] must be a str, got {type(document).__name__}"
            ) from None
        except UnicodeEncodeError as error:
            raise InputError(
                f"documents[{len(encoded)}] has {document[error.start]!r}, half of a surrogate"
                " pair, which UTF-8 cannot hold; decode its source with errors='replace'"
            ) from None
    return encoded


@cache
def _classes(count: int) -> NDArray[np.uint8]:
    """Tell of the first code points whether Python takes them for parts of words or white space."""
    characters = [chr(code) for code in range(count)]
    words = np.frombuffer(bytes(map(str.isalnum, characters)), np.uint8)
    spaces = np.frombuffer(bytes(map(str.isspace, characters)), np.uint8)
    classes = words + 2 * spaces
    classes[ord("_")] = 1
    return classes


Documents: TypeAlias = tuple[list[str], list[str] | list[int] | None]
"""Texts, and the label of each where there are labels."""

MOST_LABEL = 1000
"""The most characters of a label: an array of texts is as wide as the longest."""

Fail: TypeAlias = Callable[[int, str], InputError]


def read_lines(block: bytes, fail: Fail) -> Documents:
    """Take each line as a document; there are no labels."""
    return _lines(block, fail), None


def read_tsv(block: bytes, fail: Fail, *, header: str, label: str | None, text: str) -> Documents:
    """Take a document and its label, a string, from columns separated by tabs.

    Quotes have no meaning. ``header`` is the file's first line, which names the columns and is no
    part of the block; ``label`` and ``text`` are two of these names. Without ``label`` there are no
    labels.

    Raises
    ------
    InputError
        When a column is missing, a line has more or fewer fields than the header, a label is empty
        or no label, or the block is not UTF-8.
    """
    names = header.split("\t")
    for name in (text, *([] if label is None else [label])):
        if names.count(name) != 1:
            raise InputError(f"expected one column {name!r}, got {str(names)[1:-1]}")
    text_at, label_at = names.index(text), None if label is None else names.index(label)
    rows = [line.split("\t") for line in _lines(block, fail)]
    for number, row in enumerate(rows):
        if len(row) != len(names):
            raise fail(number, f"expected {len(names)} fields, got {len(row)}")
        if label_at is not None and (wrong := _wrong(row[label_at])):
            raise fail(number, f"the label, column {label!r}, {wrong}")
    labels = None if label_at is None else [row[label_at] for row in rows]
    return [row[text_at] for row in rows], labels


def read_json_lines(block: bytes, fail: Fail, *, label: str | None, text: str) -> Documents:
    """Take a document and its label from two fields of a JSON object on each line.

    The label is a string or an integer, and of one type in all lines. Without ``label`` there are
    no labels.

    Raises
    ------
    InputError
        When a line is not a JSON object, a field is missing or of another type, a label is empty,
        no label or of another type than those before, or the block is not UTF-8.
    """
    documents: list[str] = []
    labels: list[Any] = []
    for number, line in enumerate(_lines(block, fail)):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise fail(number, f"not JSON: {error}") from None
        if not isinstance(record, dict):
            raise fail(number, f"expected a JSON object, got {line[:40]!r}")
        try:
            documents.append(_field(record, text, [str]))
            if label is not None:
                labels.append(_label(record, label, labels))
        except InputError as error:
            raise fail(number, str(error)) from None
    return documents, None if label is None else labels


def _wrong(label: str) -> str:
    """Say what is wrong with a label, if anything is."""
    if not label:
        return "is empty"
    if len(label) > MOST_LABEL:
        return f"is longer than {MOST_LABEL} characters"
    return "ends with a NUL, which arrays of texts leave out" if label[-1] == "\0" else ""


def _label(record: dict[str, Any], name: str, before: Sequence[Any]) -> Any:
    found = _field(record, name, [type(before[0])] if before else [str, int])
    if isinstance(found, str) and (wrong := _wrong(found)):
        raise InputError(f"the label, field {name!r}, {wrong}")
    if isinstance(found, int) and not -(2**63) <= found < 2**63:
        raise InputError(f"the label, field {name!r}, must fit in 64 bits, got {found}")
    return found


def _field(record: dict[str, Any], name: str, kinds: Sequence[type]) -> Any:
    if name not in record:
        raise InputError(f"expected a field {name!r}, got {', '.join(map(repr, record)) or 'none'}")
    value = record[name]
    if type(value) not in kinds:  # True is an int as well
        expected = " or ".join({str: "a string", int: "an integer"}[kind] for kind in kinds)
        raise InputError(f"field {name!r} must be {expected}, got {json.dumps(value)[:40]}")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError(f"field {name!r} has half of a surrogate pair") from None
    return value


def _lines(block: bytes, fail: Fail) -> list[str]:
    try:
        lines = block.decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        number = block.count(b"\n", 0, error.start)
        byte = block[error.start]
        raise fail(number, f"byte {byte:#04x} is not UTF-8; convert the file") from None
    return lines if lines[-1] else lines[:-1]
