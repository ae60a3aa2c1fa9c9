"""Which rank reads which bytes of some text files."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparcel._checks import checked_whole
from sparcel.errors import InputError

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
