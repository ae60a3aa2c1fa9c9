"""Documents and labels from blocks of whole lines of text files.

Texts are UTF-8, and lines end with LF or CR LF. Blocks of a file can be read in any order and in
several processes: their errors are made by a function of the line, counted from 0 in the block, and
what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from sparcel.errors import InputError

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
