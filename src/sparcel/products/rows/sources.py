"""What rows are read from: SVMlight files, or text of which n-grams are hashed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any, Literal, TypeAlias, TypeVar

import numpy as np

from sparcel import _cpu
from sparcel.core._checks import checked_whole
from sparcel.core._threads import in_order
from sparcel.errors import InputError, checked_name
from sparcel.products.rows.cache import CacheWriter, fingerprint, holds, load, mapped
from sparcel.products.rows.files import Block, FilePiece, Paths, blocks, pieces
from sparcel.products.rows.rows import MOST_INT32, Array, Rows, join
from sparcel.products.rows.text import (
    MOST_LABEL,
    Documents,
    Fail,
    HashedNGrams,
    read_json_lines,
    read_lines,
    read_tsv,
)

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
        if threads is not None:
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


LAYOUTS = ("lines", "tsv", "jsonl")

Reader: TypeAlias = Callable[[bytes, Fail], Documents]


@dataclass(frozen=True)
class Text:
    """Text files with a document on each line.

    Attributes
    ----------
    layout
        ``"lines"``, a document a line, without labels; ``"tsv"``, columns that the first line
        names; ``"jsonl"``, a JSON object a line.
    ngrams
        What rows are made of.
    label, text
        The names of the columns, or fields; no label where there are no labels.
    """

    layout: Literal["lines", "tsv", "jsonl"]
    ngrams: HashedNGrams
    label: str | None = "label"
    text: str = "text"

    def __post_init__(self) -> None:
        checked_name(self.layout, LAYOUTS, "layout")
        if self.label == self.text:
            raise InputError(
                f"label and text must be different columns, got {self.text!r} for both"
            )

    def read(self, paths: Paths, rank: int = 0, ranks: int = 1) -> Rows:
        """Return a rank's part of the rows; files are shared out as by `read_svmlight`.

        Raises
        ------
        InputError
            When a file cannot be read, or a line is not as it should be, with the file and line.
        """
        return join(self.blocks(paths, rank=rank, ranks=ranks), self.ngrams.dimensions, None)

    def blocks(
        self, paths: Paths, labels: Labels = "numbers", rank: int = 0, ranks: int = 1
    ) -> Iterator[Rows]:
        """Yield a rank's part of the rows, block by block.

        Labels keep their types, whatever ``labels`` is.
        """
        read = chain.from_iterable(self._readable(piece) for piece in pieces(paths, rank, ranks))
        found = in_order(self._rows, read)
        return (rows for rows in found if len(rows))

    def _readable(self, piece: FilePiece) -> Iterator[tuple[Block, Reader]]:
        """Yield the blocks of a piece, each with what reads it."""
        reader: Reader = read_lines
        if self.layout == "jsonl":
            reader = partial(read_json_lines, label=self.label, text=self.text)
        elif self.layout == "tsv":
            header = _first_line(piece.path)
            reader = partial(read_tsv, header=header, label=self.label, text=self.text)
            try:
                reader(b"", lambda _, what: InputError(what))
            except InputError as error:
                raise InputError(f"{piece.path}:1: {error}") from None
        return ((block, reader) for block in blocks(piece))

    def _rows(self, given: tuple[Block, Reader]) -> Rows:
        block, reader = given
        lines, skipped = block.lines, 0
        if self.layout == "tsv" and block.offset == 0:
            lines, skipped = lines.partition(b"\n")[2], 1

        def fail(line: int, what: str) -> InputError:
            return block.error(line + skipped, what)

        documents, labels = reader(lines, fail)
        found = np.array(labels) if labels else None
        return self.ngrams.rows(documents, found, threads=1)


Source: TypeAlias = SvmLight | Text


def describe(source: Source) -> dict[str, Any]:
    """Return a source as what JSON holds; `described` makes the source of it."""
    return {"kind": type(source).__name__, **asdict(source)}


def described(about: dict[str, Any]) -> Source:
    """Return the source that `describe` described."""
    settings = dict(about)
    if settings.pop("kind") == "SvmLight":
        return SvmLight(**settings)
    ngrams = settings.pop("ngrams")
    return Text(**settings, ngrams=HashedNGrams(**ngrams))


def make_cache(path: str | os.PathLike[str], paths: Paths, source: Source) -> None:
    """Write the rows of files to a cache, unless it holds them already.

    The files are read block by block, so their rows are never in memory together.

    Raises
    ------
    InputError
        When a file cannot be read or is malformed; the cache is then left as it was.
    """
    made_of = fingerprint(paths, **describe(source))
    if not holds(path, made_of):
        try:
            numbers_or_texts(lambda kind: _write(path, made_of, source.blocks(paths, kind)))
        except OSError as error:
            raise InputError(f"{path} can't be written: {error.strerror}") from error
        _cpu.drop_kept()


def _write(to: str | os.PathLike[str] | IO[bytes], made_of: str, parts: Iterator[Rows]) -> None:
    with CacheWriter(to, made_of) as writer:
        for rows in parts:
            writer.append(rows)


def cached(
    path: str | os.PathLike[str], paths: Paths, source: Source, rank: int = 0, ranks: int = 1
) -> Rows:
    """Return a rank's share of a cache that `make_cache` made, mapped, balanced by entries."""
    rows = load(path, fingerprint(paths, **describe(source)), rank, ranks)
    if rows is None:
        raise InputError(
            f"{path} is not there on this machine, or is a cache of other rows; give each machine"
            " a folder that its own ranks share"
        )
    return rows


def map_rows(
    paths: Paths, source: Source, rank: int = 0, ranks: int = 1, labels: Labels = "numbers"
) -> Rows:
    """Return a rank's part of the rows of files, mapped from a file that goes with them.

    So they need not fit in memory. The file is in the folder for temporary files.

    Raises
    ------
    InputError
        When a file cannot be read or is malformed, or there is no room for the rows.
    """
    try:
        with TemporaryFile() as file:
            _write(file, "", source.blocks(paths, labels, rank, ranks))
            rows = mapped(file)
    except OSError as error:
        raise InputError(
            f"the rows can't be written to {gettempdir()}: {error.strerror}; give a cache, or set"
            " TMPDIR to a folder with more room"
        ) from error
    _cpu.drop_kept()
    return rows


def _first_line(path: Path) -> str:
    for block in blocks(FilePiece(path, 0, path.stat().st_size)):
        return block.lines.partition(b"\n")[0].decode(errors="replace").removesuffix("\r")
    return ""
