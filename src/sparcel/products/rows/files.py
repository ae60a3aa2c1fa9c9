"""Text files, plain or compressed, as blocks of whole lines, and which rank reads what of them."""

from __future__ import annotations

import bz2
import codecs
import lzma
import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sparcel.core._checks import checked_whole
from sparcel.errors import InputError, optional

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

COMPRESSED_WEIGHT = 4
"""What a compressed byte counts in bytes of text: text of sparse rows shrinks to about a fourth."""


@dataclass(frozen=True)
class FilePiece:
    """What one rank reads of a file: the lines whose first byte lies in ``[start, stop)``.

    A compressed file is one piece.
    """

    path: Path
    start: int
    stop: int


def is_compressed(path: Path) -> bool:
    """Tell by the name whether a file has to be decompressed."""
    return path.suffix in (".gz", ".bz2", ".xz", ".zst")


def files_of(paths: Paths) -> list[Path]:
    """Return the files that ``paths`` names.

    Raises
    ------
    InputError
        When there are none, or one is not that of a file.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    try:
        files = [Path(path) for path in several]
    except TypeError:
        kind = type(paths).__name__
        raise InputError(f"paths must be the path of a file, or several, got {kind}") from None
    if not files:
        raise InputError("paths must name at least one file, got none")
    for path in files:
        try:
            if path.is_symlink() and not path.exists():
                raise InputError(f"{path} is a link that leads to no file")
            if not path.is_file():
                is_there = path.exists()
                raise InputError(f"{path} is no file" if is_there else f"there is no file {path}")
        except OSError as error:
            raise InputError(f"{path} can't be read: {error.strerror}") from error
    return files


def pieces(paths: Paths, rank: int, ranks: int) -> list[FilePiece]:
    """Return what a rank reads of these files, in their order; see `parts`."""
    checked_whole(ranks, "ranks", at_least=1)
    checked_whole(rank, "rank", at_least=0, at_most=ranks - 1)
    return parts([(path, path.stat().st_size) for path in files_of(paths)], ranks)[rank]


def parts(files: Sequence[tuple[Path, int]], ranks: int) -> list[list[FilePiece]]:
    """Divide files evenly among ranks.

    A compressed file goes to one rank: the largest first, each to the rank that has the least so
    far. What ranks then have less than others is cut from the plain files, in their order.

    Parameters
    ----------
    files
        Names and sizes in bytes. The result depends on nothing else.
    ranks
        How many ranks share the files.

    Returns
    -------
    list
        The pieces of each rank, in the order of the files.
    """
    loads, owners = [0] * ranks, dict[int, int]()
    packed = [place for place, (path, _) in enumerate(files) if is_compressed(path)]
    for place in sorted(packed, key=lambda place: -files[place][1]):
        owners[place] = rank = loads.index(min(loads))
        loads[rank] += files[place][1] * COMPRESSED_WEIGHT
    plain = sum(size for place, (_, size) in enumerate(files) if place not in owners)
    wanted, rank = _shares(loads, plain), 0
    given: list[list[FilePiece]] = [[] for _ in range(ranks)]
    for place, (path, size) in enumerate(files):
        if place in owners:
            given[owners[place]].append(FilePiece(path, 0, size))
            continue
        start = 0
        while start < size:
            stop = min(size, start + wanted[rank])
            if start < stop:
                given[rank].append(FilePiece(path, start, stop))
            wanted[rank] -= stop - start
            rank += wanted[rank] == 0
            start = stop
    return given


def _shares(loads: Sequence[int], total: int) -> list[int]:
    """Divide ``total`` so that the smallest loads rise to one level, up to a difference of 1."""

    def lacking(level: int) -> int:
        return sum(max(0, level - load) for load in loads)

    level = bisect_right(range(max(loads) + total + 1), total, key=lacking) - 1
    shares = [max(0, level - load) for load in loads]
    low = [rank for rank, load in enumerate(loads) if load <= level]
    for rank in low[: total - sum(shares)]:
        shares[rank] += 1
    return shares


BLOCK_BYTES = 2 << 20
"""How much is read at a time: so much that a call costs little, and that it stays in the cache."""

MOST_LINE = 64 << 20
"""Bytes: whoever has a longer line has forgotten to end it, or means harm."""

_PACKED_BYTES = 512
"""How much is decompressed at a time: four bytes of zstd can become 128 KiB."""

_MOST_RATIO = 1 << 10
"""How long a text may become for each packed byte; gzip does no more, and texts do less."""


def _zstd() -> Any:
    with optional("reading .zst files", "linear"):
        import zstandard
    return zstandard.ZstdDecompressor().decompressobj()


_DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".zst": _zstd,
}
"""What makes the decoder of one stream, by the end of a file's name."""


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
            if sum(map(len, started)) > MOST_LINE:
                raise _block(piece.path, begin, b"").error(
                    0, f"the line has more than {MOST_LINE} bytes; divide it"
                )
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
        if is_compressed(path):
            yield from _decompressed(file, _DECODERS[path.suffix])
        else:
            file.seek(begin)
            while chunk := file.read(min(BLOCK_BYTES, end - begin)):
                begin += len(chunk)
                yield chunk
            if begin < end:
                raise EOFError(f"it ended after {begin} bytes, and had {end}; leave it as it is")


def _decompressed(file: BinaryIO, decoder: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress stream by stream: after the first one, zeros are padding, and all else a stream.

    The readers of `bz2` and `lzma` end without a word where a later stream does not begin as it
    should, and that of zstandard where the file was cut off.
    """
    stream, begin, read, held, length, total = decoder(), 0, 0, [], 0, 0
    while packed := file.read(_PACKED_BYTES):
        read += len(packed)
        while packed:
            if stream is None:
                packed = packed.lstrip(b"\0")  # padding
                if not packed:
                    break
                stream, begin = decoder(), read - len(packed)
            for part in _unpacked(stream, packed, begin):
                held.append(part)
                length, total = length + len(part), total + len(part)
                if total > MOST_LINE + _MOST_RATIO * read:
                    raise OSError(
                        f"it becomes more than {_MOST_RATIO} times as long, which text does not;"
                        " decompress it by hand if it is what you want"
                    )
                if length >= BLOCK_BYTES:
                    yield b"".join(held)
                    held, length = [], 0
            packed = stream.unused_data
            stream = None if stream.eof else stream
    if not read:
        raise EOFError("it is empty, and compressed files are not")
    if stream is not None:
        raise EOFError(f"it ends within the stream that begins at byte {begin}")
    yield b"".join(held)


def _unpacked(stream: Any, packed: bytes, begin: int) -> Iterator[bytes]:
    """Decompress some bytes of the stream that begins there, about a block at a time."""
    bounds = [BLOCK_BYTES] if hasattr(stream, "needs_input") else []  # as bz2, where 40 are enough
    is_left = True
    while is_left:
        try:
            part = stream.decompress(packed, *bounds)
        except Exception as error:  # each library has its own
            why = str(error) or repr(error)
            raise OSError(f"{why}, in the stream that begins at byte {begin}") from error
        yield part
        packed, is_left = b"", bool(bounds) and not (stream.eof or stream.needs_input)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of reading and decompressing into an error that names the file."""
    try:
        yield
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} can't be read: {reason}") from error
