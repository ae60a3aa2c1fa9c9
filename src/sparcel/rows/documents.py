"""Documents and labels from parts of text files.

Each reader takes a block of whole lines, the number of the block's first line and the name of the
file, so that parts of a file can be read in any order and in several processes. Its errors name the
file and the line. Texts are UTF-8, and lines end with LF or CR LF.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from sparcel.errors import InputError

Documents: TypeAlias = tuple[list[str], list[str] | list[int] | None]
"""Texts, and the label of each where there are labels."""


def read_lines(block: bytes, first: int, file: str) -> Documents:
    """Take each line as a document; there are no labels."""
    return _lines(block, first, file), None


def read_tsv(
    block: bytes, first: int, file: str, *, header: bytes, label: str, text: str
) -> Documents:
    """Take a document and its label, a string, from columns separated by tabs.

    Quotes have no meaning. ``header`` is the file's first line, which names the columns, and
    ``label`` and ``text`` are two of these names.

    Raises
    ------
    InputError
        When a column is missing, a line has more or fewer fields than the header, a label is empty,
        or the block is not UTF-8.
    """
    names = "".join(_lines(header, 1, file)).split("\t")
    for name in (label, text):
        if names.count(name) != 1:
            raise _wrong(file, 1, f"expected one column {name!r}, got {str(names)[1:-1]}")
    label_at, text_at = names.index(label), names.index(text)
    rows = [line.split("\t") for line in _lines(block, first, file)]
    for number, row in enumerate(rows, first):
        if len(row) != len(names):
            raise _wrong(file, number, f"expected {len(names)} fields, got {len(row)}")
        if not row[label_at]:
            raise _wrong(file, number, f"the label, column {label!r}, is empty")
    return [row[text_at] for row in rows], [row[label_at] for row in rows]


def read_json_lines(block: bytes, first: int, file: str, *, label: str, text: str) -> Documents:
    """Take a document and its label from two fields of a JSON object on each line.

    The label is a string or an integer, and of one type in all lines.

    Raises
    ------
    InputError
        When a line is not a JSON object, a field is missing or of another type, a label is empty or
        of another type than those before, or the block is not UTF-8.
    """
    documents: list[str] = []
    labels: list[Any] = []
    for number, line in enumerate(_lines(block, first, file), first):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _wrong(file, number, f"not JSON: {error}") from None
        if not isinstance(record, dict):
            raise _wrong(file, number, f"expected a JSON object, got {line[:40]!r}")
        kinds = [type(labels[0])] if labels else [str, int]
        try:
            documents.append(_field(record, text, [str]))
            labels.append(_field(record, label, kinds))
        except InputError as error:
            raise _wrong(file, number, str(error)) from None
        if labels[-1] == "":
            raise _wrong(file, number, f"the label, field {label!r}, is empty")
    return documents, labels


def _field(record: dict[str, Any], name: str, kinds: Sequence[type]) -> Any:
    if name not in record:
        raise InputError(f"expected a field {name!r}, got {', '.join(map(repr, record)) or 'none'}")
    value = record[name]
    if type(value) not in kinds:  # True is an int as well
        expected = " or ".join({str: "a string", int: "an integer"}[kind] for kind in kinds)
        raise InputError(f"field {name!r} must be {expected}, got {json.dumps(value)[:40]}")
    return value


def _lines(block: bytes, first: int, file: str) -> list[str]:
    try:
        lines = block.decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        number = first + block.count(b"\n", 0, error.start)
        byte = block[error.start]
        raise _wrong(file, number, f"byte {byte:#04x} is not UTF-8; convert the file") from None
    return lines if lines[-1] else lines[:-1]


def _wrong(file: str, line: int, what: str) -> InputError:
    return InputError(f"{file}:{line}: {what}")
