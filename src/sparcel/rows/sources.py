"""What rows are read from: SVMlight files, or text of which n-grams are hashed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any, Literal, TypeAlias

import numpy as np

from sparcel import _cpu
from sparcel._threads import in_order
from sparcel.errors import InputError, checked_name
from sparcel.rows import cache, cache_writer
from sparcel.rows.documents import Documents, Fail, read_json_lines, read_lines, read_tsv
from sparcel.rows.files import Block, blocks
from sparcel.rows.pieces import FilePiece, Paths, pieces
from sparcel.rows.rows import Rows, join
from sparcel.rows.svmlight import Labels, SvmLight, numbers_or_texts
from sparcel.rows.text import HashedNGrams

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
    made_of = cache.fingerprint(paths, **describe(source))
    if not cache.holds(path, made_of):
        try:
            numbers_or_texts(lambda kind: _write(path, made_of, source.blocks(paths, kind)))
        except OSError as error:
            raise InputError(f"{path} can't be written: {error.strerror}") from error
        _cpu.drop_kept()


def _write(to: str | os.PathLike[str] | IO[bytes], made_of: str, parts: Iterator[Rows]) -> None:
    with cache_writer.CacheWriter(to, made_of) as writer:
        for rows in parts:
            writer.append(rows)


def cached(
    path: str | os.PathLike[str], paths: Paths, source: Source, rank: int = 0, ranks: int = 1
) -> Rows:
    """Return a rank's share of a cache that `make_cache` made, mapped, balanced by entries."""
    rows = cache.load(path, cache.fingerprint(paths, **describe(source)), rank, ranks)
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
            rows = cache.mapped(file)
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
