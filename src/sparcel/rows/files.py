"""Text files, plain or compressed, as blocks of whole lines."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from sparcel.errors import InputError, optional
from sparcel.rows.pieces import FilePiece, is_compressed

BLOCK_BYTES = 2 << 20
"""How much is read at a time: so much that a call costs little, and that it stays in the cache."""


_OPENED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""What decompresses an open file, by the end of its name."""


@dataclass(frozen=True)
class Block:
    """Whole lines of a file, each with its newline; they begin ``offset`` bytes into its text."""

    path: Path
    offset: int
    lines: bytes

    def error(self, line: int, message: str) -> InputError:
        """Make the error of a line, which is counted from 0 in this block.

        The lines before the block are counted only now.
        """
        left, number = self.offset, 1 + line
        for chunk in _chunks(self.path, 0, left):
            number += chunk.count(b"\n", 0, left)
            left -= min(left, len(chunk))
            if left == 0:
                break
        return InputError(f"{self.path}:{number}: {message}")


def blocks(piece: FilePiece) -> Iterator[Block]:
    """Read the lines of a piece.

    Raises
    ------
    InputError
        When the file cannot be read or decompressed.
    """
    begin, end = _bounds(piece)
    started: list[bytes] = []  # a line that goes on in the next chunk
    for chunk in _chunks(piece.path, begin, end):
        cut = chunk.rfind(b"\n") + 1
        if cut == 0:
            started.append(chunk)
            continue
        lines = b"".join([*started, memoryview(chunk)[:cut]])
        yield _block(piece.path, begin, lines)
        begin += len(lines)
        started = [chunk[cut:]]
    if last := b"".join(started):
        yield _block(piece.path, begin, last + b"\n")


def _block(path: Path, offset: int, lines: bytes) -> Block:
    # Some editors begin a file with this mark, which would become part of the first label.
    return Block(path, offset, lines if offset else lines.removeprefix(codecs.BOM_UTF8))


def _bounds(piece: FilePiece) -> tuple[int, int]:
    """Return where the first line of a piece begins, and where its last line ends."""
    if is_compressed(piece.path):
        return piece.start, piece.stop
    with _readable(piece.path), piece.path.open("rb") as file:
        return _line_start(file, piece.start), _line_start(file, piece.stop)


def _line_start(file: BinaryIO, at: int) -> int:
    """Return where the first line begins that does not begin before ``at``."""
    if at == 0:
        return 0
    file.seek(at - 1)
    file.readline()
    return file.tell()


def _chunks(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """Read the bytes in ``[begin, end)`` of a plain file, or all that a compressed file holds."""
    with _readable(path), path.open("rb") as file:
        if path.suffix in _OPENED:
            with _OPENED[path.suffix](file) as text:
                yield from iter(partial(text.read, BLOCK_BYTES), b"")
        elif path.suffix == ".zst":
            yield from _zstd_chunks(file)
        else:
            file.seek(begin)
            while chunk := file.read(min(BLOCK_BYTES, end - begin)):
                begin += len(chunk)
                yield chunk


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress frame by frame; zstandard's own reader takes a truncated file for a short one."""
    with optional("reading .zst files", "linear"):
        import zstandard
    frame, held, length = None, [], 0
    # Little at a time, because it may become thousands of times as long.
    while packed := file.read(max(1, BLOCK_BYTES // 256)):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                held.append(frame.decompress(packed))
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            length += len(held[-1])
            packed = frame.unused_data
            frame = None if frame.eof else frame
        if length >= BLOCK_BYTES:
            yield b"".join(held)
            held, length = [], 0
    yield b"".join(held)
    if frame is not None:
        raise EOFError("the file ends within a frame")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of reading and decompressing into an error that names the file."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} can't be read: {reason}") from error
