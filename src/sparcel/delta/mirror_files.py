"""The files of a mirror, which is one copy of the weights for all processes of a host.

A mirror is a folder, best in memory. It has the weights in a safetensors file, as the folder of a
checkpoint does, which is written in place; for each of the last versions, a file with the places of
what changed; and a page that tells the version, and by an odd number that the weights are just
being written (a sequence lock).
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparcel._files import shared
from sparcel.delta.bits import bits_of
from sparcel.delta.chunk import Version
from sparcel.delta.files import File
from sparcel.delta.making import version_of
from sparcel.errors import FormatError

PAGE, WEIGHTS, COMING = "mirror.page", "model.safetensors", "coming"
_MAGIC = b"SPDmirr2"
_WORDS = 8
"""Numbers on the page, of 64 bits each."""
_CHANGES = re.compile(r"changes-(\d+)-([0-9a-f]{16})-(\d+)-([0-9a-f]{16})")
_OURS = re.compile(rf"({_CHANGES.pattern}|{COMING})(\.[0-9a-f]{{16}}\.part)?")


class Page:
    """The page of a mirror, which one process writes and others read."""

    def __init__(self, path: Path, writes: bool) -> None:
        self._path, self._found = path, os.stat(path, follow_symlinks=False)
        data = shared(path, writes=writes)
        if len(data) != len(self.blank()) or data[: len(_MAGIC)] != _MAGIC:
            raise FormatError(f"{path} is no page of a mirror")
        self._words = np.frombuffer(data, np.uint64, _WORDS)

    @staticmethod
    def blank() -> bytes:
        """Return a page of which no version is told yet, as if it were being written."""
        words = np.array([1, *[0] * (_WORDS - 2)], np.uint64)
        return _MAGIC + words.tobytes()

    @property
    def is_there(self) -> bool:
        """Whether the mirror still has this page, and no other one in its place."""
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), self._found)
        except FileNotFoundError:
            return False

    @property
    def sequence(self) -> int:
        """A number that grows with each write, and is odd meanwhile."""
        return int(self._words[1])

    def told(self) -> tuple[Version, int]:
        """Return the version, and the number of the file of weights, which is 0 before any."""
        number, total, file = (int(word) for word in self._words[2:5])
        return Version(number, total), file

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Tell readers to wait; after an error they go on waiting."""
        self._words[1] = self.sequence | 1
        yield
        self._words[1] = self.sequence + 1

    def tell(self, version: Version, file: int) -> None:
        """Note a version while it is being written."""
        self._words[2:5] = version.number, version.sum, file


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, which must not be written, as all see them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return File(shared(path, writes=False), path.name).tensors()


def is_version(weights: File, version: Version) -> bool:
    """Read all weights, under each name of tied ones, and tell whether they are a version."""
    tensors = weights.tensors()
    return version_of(tensors, version.number) == version and all(
        torch.equal(bits_of(copy), bits_of(tensors[name]))
        for name, copy in weights.copies().items()
    )


def changes_name(base: Version, version: Version) -> str:
    """Return the name of the file that tells where a version differs from the one before."""
    told = "-".join(f"{one.number}-{one.sum:016x}" for one in (base, version))
    return f"changes-{told}"


def changes_of(name: str) -> tuple[Version, Version] | None:
    """Return the versions of which a file tells the changes, or None if it is another file."""
    match = _CHANGES.fullmatch(name)
    if match is None:
        return None
    numbers, sums = match.group(1, 3), match.group(2, 4)
    base, version = (Version(int(n), int(s, 16)) for n, s in zip(numbers, sums, strict=True))
    return base, version


def is_passing(name: str) -> bool:
    """Tell whether a file is one that followers write beside the weights, or began to."""
    return _OURS.fullmatch(name) is not None
