"""Rows from SVMlight files, as LIBSVM and others write them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Literal

import numpy as np
import torch

from sparcel import _cpu
from sparcel._checks import whole_number
from sparcel.errors import InputError, known
from sparcel.rows._growing import MOST_INT32, join
from sparcel.rows._threads import in_order
from sparcel.rows.files import Block, blocks
from sparcel.rows.pieces import Paths, pieces
from sparcel.rows.rows import Array, Rows

Labels = Literal["numbers", "texts"]

_NONE: dict[Labels, Array] = {"numbers": np.zeros(0, np.float64), "texts": np.zeros(0, np.str_)}
_MOST_LABEL_BYTES = 1000  # an array of texts is as wide as the longest


class TextLabelError(InputError):
    """A label is no number, not even one that is not finite."""


def read_svmlight(
    paths: Paths,
    dimensions: int | None = None,
    index_from: int = 1,
    rank: int = 0,
    ranks: int = 1,
    threads: int | None = None,
    labels: Labels | None = None,
) -> Rows:
    """Read rows that are written as ``label index:value index:value ... # comment``.

    Indices increase within a line. Blank lines and comments are skipped. Files whose names end in
    ``.gz``, ``.bz2``, ``.xz`` or ``.zst`` are decompressed.

    Parameters
    ----------
    paths
        A file, or several, whose rows follow one another.
    dimensions
        Number of columns. If None, it is what the highest index of this rank needs. Ranks then
        have to agree on the highest: ``dataclasses.replace(rows, dimensions=highest)``.
    index_from
        The index of the first column: 1, or 0.
    rank, ranks
        Read only this rank's part of the files, about one of ``ranks`` equal parts: of plain files
        a range of lines, of compressed ones whole files. With plain files alone, the rows of all
        ranks in turn are the rows of the files.
    threads
        How many threads parse; None for as many as torch uses. The result is the same.
    labels
        ``"numbers"`` for float64, ``"texts"`` for strings, or None for numbers if all labels of
        this rank are numbers, and strings otherwise. Ranks that find different kinds have to agree
        on one and read again.

    Returns
    -------
    Rows
        Columns are int32, or int64 for more than 2^31 - 1 dimensions; values are float32.

    Raises
    ------
    InputError
        When a file cannot be read, or a line is malformed, with the file and the line. Labels that
        are NaN or infinite are texts only where these are asked for. Queries
        (``qid:``) are refused: without them ranking data would silently become something else.
    """
    settings = (dimensions, index_from, rank, ranks, threads)
    if labels is not None:
        return join(svmlight_blocks(paths, *settings, labels), dimensions, _NONE[labels])
    try:
        return join(svmlight_blocks(paths, *settings, "numbers"), dimensions, _NONE["numbers"])
    except TextLabelError:
        return join(svmlight_blocks(paths, *settings, "texts"), dimensions, _NONE["texts"])


def svmlight_blocks(
    paths: Paths,
    dimensions: int | None = None,
    index_from: int = 1,
    rank: int = 0,
    ranks: int = 1,
    threads: int | None = None,
    labels: Labels = "numbers",
) -> Iterator[Rows]:
    """Yield the rows of `read_svmlight` block by block, for sets that do not fit in memory.

    Without ``dimensions``, a block has those that its own highest index needs.
    """
    if dimensions is not None:
        whole_number(dimensions, "dimensions", at_least=1, at_most=2**62)
    whole_number(index_from, "index_from", at_least=0, at_most=1)
    known(labels, ("numbers", "texts"), "labels")
    if threads is None:
        threads = torch.get_num_threads()
    whole_number(threads, "threads", at_least=1)
    parse = partial(_parse, dimensions=dimensions, index_from=index_from, labels=labels)
    read = chain.from_iterable(blocks(piece) for piece in pieces(paths, rank, ranks))
    return in_order(parse, read, threads)


def _parse(block: Block, dimensions: int | None, index_from: int, labels: Labels) -> Rows:
    try:
        offsets, columns, values, numbers, spans = _cpu.parse_svmlight(
            block.lines, index_from, dimensions or MOST_INT32
        )
    except _cpu.MalformedLineError as malformed:
        line, message = malformed.args
        raise block.error(line, message) from None
    found = _numbers(block, numbers, spans) if labels == "numbers" else _texts(block, spans)
    return Rows(offsets, columns, values, dimensions or 1 + int(columns.max(initial=-1)), found)


def _numbers(block: Block, numbers: Array, spans: Array) -> Array:
    if not np.isnan(numbers).any():
        return numbers
    start, stop = spans[np.isnan(numbers)][0]
    text = block.lines[start:stop].decode(errors="backslashreplace")
    line = block.lines.count(b"\n", 0, start)
    error = block.error(line, f"the label {text!r} is no finite number; labels='texts' takes any")
    try:
        float(text)
    except ValueError:
        raise TextLabelError(*error.args) from None
    raise error  # NaN or Inf, which stand for a label that is missing or wrong, and name no class


def _texts(block: Block, spans: Array) -> Array:
    labels = []
    for start, stop in spans.tolist():
        if stop - start > _MOST_LABEL_BYTES:
            line = block.lines.count(b"\n", 0, start)
            raise block.error(line, f"the label is longer than {_MOST_LABEL_BYTES} bytes")
        try:
            labels.append(block.lines[start:stop].decode())
        except UnicodeDecodeError as error:
            line = block.lines.count(b"\n", 0, start)
            raise block.error(line, f"the label {error.object!r} is not UTF-8") from None
    return np.array(labels, np.str_)
