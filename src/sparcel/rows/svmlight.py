"""Rows from SVMlight files, as LIBSVM and others write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, TypeVar

import numpy as np
import torch

from sparcel import _cpu
from sparcel._checks import checked_whole
from sparcel._threads import in_order
from sparcel.errors import InputError, checked_name
from sparcel.rows.documents import MOST_LABEL
from sparcel.rows.files import Block, blocks
from sparcel.rows.pieces import Paths, pieces
from sparcel.rows.rows import MOST_INT32, Array, Rows, join

T = TypeVar("T")
Labels = Literal["numbers", "texts"]

_NONE: dict[Labels, Array] = {"numbers": np.zeros(0, np.float64), "texts": np.zeros(0, np.str_)}

_ALL_WHOLE = 2.0**53
"""Of whole numbers from here on, float64 holds only some: two labels may become one."""
_WHOLE = re.compile(r"[+-]?0*(\d+)(\.0*)?", re.ASCII)


class TextLabelError(InputError):
    """A label is no number, not even one that is not finite, or one that float64 cannot hold."""


def numbers_or_texts(read: Callable[[Labels], T]) -> T:
    """Return what ``read`` returns for labels that are numbers, or else for labels of any kind."""
    try:
        return read("numbers")
    except TextLabelError:
        return read("texts")


@dataclass(frozen=True)
class SvmLight:
    """Files with ``label index:value index:value ... # comment`` on each line.

    Indices increase within a line. Blank lines and comments are skipped. Files whose names end in
    ``.gz``, ``.bz2``, ``.xz`` or ``.zst`` are decompressed.

    Attributes
    ----------
    dimensions
        Number of columns. If None, it is what the highest index of this rank needs. Ranks then
        have to agree on the highest: ``dataclasses.replace(rows, dimensions=highest)``.
    index_from
        The index of the first column: 1, or 0.
    """

    dimensions: int | None = None
    index_from: int = 1

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            given = checked_whole(self.dimensions, "dimensions", at_least=1, at_most=2**62)
            object.__setattr__(self, "dimensions", given)
        given = checked_whole(self.index_from, "index_from", at_least=0, at_most=1)
        object.__setattr__(self, "index_from", given)

    def read(
        self,
        paths: Paths,
        rank: int = 0,
        ranks: int = 1,
        labels: Labels | None = None,
        threads: int | None = None,
    ) -> Rows:
        """Return the rows of files, or a rank's part of them.

        Parameters
        ----------
        paths
            A file, or several, whose rows follow one another.
        rank, ranks
            Read only this rank's part of the files, about one of ``ranks`` equal parts: of plain
            files a range of lines, of compressed ones whole files. With plain files alone, the rows
            of all ranks in turn are the rows of the files.
        labels
            ``"numbers"`` for float64, ``"texts"`` for strings, or None for numbers if all labels of
            this rank are numbers, and strings otherwise. Whole numbers that float64 would round,
            beyond 2^53, are strings, so that no two become one. Ranks that find different kinds
            have to agree on one and read again.
        threads
            How many threads parse; None for as many as torch uses. The result is the same.

        Returns
        -------
        Rows
            Columns are int32, or int64 for more than 2^31 - 1 dimensions; values are float32.

        Raises
        ------
        InputError
            When a file cannot be read, or a line is malformed, with the file and the line. Labels
            that are NaN or infinite are texts only where these are asked for. Queries (``qid:``)
            are refused: without them ranking data would silently become something else.
        """
        if labels is None:
            return numbers_or_texts(lambda kind: self.read(paths, rank, ranks, kind, threads))
        blocks = self.blocks(paths, labels, rank, ranks, threads)
        return join(blocks, self.dimensions, _NONE[labels])

    def blocks(
        self,
        paths: Paths,
        labels: Labels = "numbers",
        rank: int = 0,
        ranks: int = 1,
        threads: int | None = None,
    ) -> Iterator[Rows]:
        """Yield the rows of `read` block by block, for sets that do not fit in memory.

        Without ``dimensions``, a block has those that its own highest index needs.
        """
        checked_name(labels, ("numbers", "texts"), "labels")
        if threads is None:
            threads = torch.get_num_threads()
        checked_whole(threads, "threads", at_least=1)
        parse = partial(self._parse, labels=labels)
        read = chain.from_iterable(blocks(piece) for piece in pieces(paths, rank, ranks))
        return in_order(parse, read, threads)

    def _parse(self, block: Block, labels: Labels) -> Rows:
        try:
            offsets, columns, values, numbers, spans = _cpu.parse_svmlight(
                block.lines, self.index_from, self.dimensions or MOST_INT32
            )
        except _cpu.MalformedLineError as malformed:
            line, message = malformed.args
            raise block.error(line, message) from None
        found = _numbers(block, numbers, spans) if labels == "numbers" else _texts(block, spans)
        dimensions = self.dimensions or 1 + int(columns.max(initial=-1))
        return Rows(offsets, columns, values, dimensions, found)


def read_svmlight(
    paths: Paths,
    dimensions: int | None = None,
    index_from: int = 1,
    rank: int = 0,
    ranks: int = 1,
    threads: int | None = None,
    labels: Labels | None = None,
) -> Rows:
    """Read rows of SVMlight files; see `SvmLight` and `SvmLight.read`."""
    return SvmLight(dimensions, index_from).read(paths, rank, ranks, labels, threads)


def _numbers(block: Block, numbers: Array, spans: Array) -> Array:
    for place in np.flatnonzero(~(np.abs(numbers) < _ALL_WHOLE)).tolist():
        start, stop = spans[place].tolist()
        text = block.lines[start:stop].decode(errors="backslashreplace")
        why, is_text = "is no finite number", not _names_number(text)
        if np.isfinite(numbers[place]):
            whole = _WHOLE.fullmatch(text)
            if whole is None or int(whole[1]) == int(abs(numbers[place])):
                continue
            why, is_text = "has more digits than a number of float64", True
        error = _label_error(block, start, f"{text!r} {why}; labels='texts' takes any")
        # NaN and Inf stand for a label that is missing or wrong, and name no class.
        raise TextLabelError(*error.args) if is_text else error
    return numbers


def _names_number(text: str) -> bool:
    """Tell whether a text is a number, of any size, NaN or Inf; 1_2 is one for Python alone."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def _texts(block: Block, spans: Array) -> Array:
    labels = []
    for start, stop in spans.tolist():
        if stop - start > MOST_LABEL:
            raise _label_error(block, start, f"is longer than {MOST_LABEL} bytes")
        try:
            labels.append(block.lines[start:stop].decode())
        except UnicodeDecodeError as error:
            raise _label_error(block, start, f"{error.object!r} is not UTF-8") from None
    return np.array(labels, np.str_)


def _label_error(block: Block, start: int, wrong: str) -> InputError:
    """Make the error of the label that begins at a byte of the block."""
    return block.error(block.lines.count(b"\n", 0, start), f"the label {wrong}")
