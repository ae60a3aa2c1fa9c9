"""The files of a mirror, which is one copy of the weights for all processes of a host.

A mirror is a folder, best in memory. It has the weights in a safetensors file, as the folder of a
checkpoint does, which is written in place; for each of the last versions, a file with the places of
what changed; and a page that tells the version, and by an odd number that the weights are just
being written (a sequence lock).
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparcel.core._files import shared
from sparcel.errors import FormatError, InputError, VersionError
from sparcel.products.delta.chunk import Version
from sparcel.products.delta.decoding import Change
from sparcel.products.delta.elements import bits_of
from sparcel.products.delta.files import File
from sparcel.products.delta.parts import owners, parts_of, version_of
from sparcel.products.delta.prepared import whole_changes
from sparcel.products.stores import Folder

PAGE, WEIGHTS, COMING = "mirror.page", "model.safetensors", "coming"
_MAGIC = b"SPDmirr2"
_WORDS = 8
"""Numbers on the page, of 64 bits each."""

_CHANGES = re.compile(r"changes-(\d+)-([0-9a-f]{16})-(\d+)-([0-9a-f]{16})")
_OURS = re.compile(rf"({_CHANGES.pattern}|{COMING})(\.[0-9a-f]{{16}}\.part)?")
_PATIENCE = 60.0
"""How many seconds a reader waits for weights that are being written."""


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


def _mapped_tensors(path: Path) -> dict[str, Tensor]:
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


@dataclass(frozen=True)
class Seen:
    """A version of a mirror that a reader has found.

    Attributes
    ----------
    base
        The version that the reader has found before, or None if all tensors are told whole.
    version
        The version.
    """

    base: Version | None
    version: Version
    _mirror: Mirror = field(repr=False)
    _sequence: int = field(repr=False)
    _changes: list[Change] | None = field(repr=False)

    def changes(self) -> Iterator[Change]:
        """Yield what has changed since ``base``, in memory of its own; or all tensors, mapped.

        Raises
        ------
        VersionError
            At the end, if all tensors were told and another version was written meanwhile: what was
            made of them is of neither. Update again.
        """
        if self._changes is not None:
            yield from self._changes
            return
        now = self._mirror.tensors
        yield from whole_changes(now, now)
        self._mirror._check(self)


class Mirror:
    """Reads what a `Follower` on the same host keeps; each process opens its own.

    Parameters
    ----------
    place
        The mirror's folder.

    Attributes
    ----------
    version
        The last version that `update` has found, or None.

    Raises
    ------
    InputError
        If nobody has made a mirror there.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.version: Version | None = None
        self._tensors: Mapping[str, Tensor] = {}
        self._folder = Folder(place)
        self._page = self._opened()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by name, mapped anew each time; none before `update` has found a version.

        Their values change when another version is written. They may be written to, as some
        engines' loaders do: other processes do not see that.
        """
        return File(self._folder.mapped(WEIGHTS), WEIGHTS).tensors() if self._file else {}

    def update(self) -> Seen | None:
        """Find out what has changed since the last time; None if nothing has, or nothing is there.

        It reads what changed, and of the rest nothing. A reader that is several versions behind, or
        has none yet, is told all tensors whole.

        Raises
        ------
        VersionError
            If the weights are being written for a minute: their follower died, or is stopped.
        InputError
            If the mirror was removed.
        """
        if not self._page.is_there:
            self._page = self._opened()
        while True:
            sequence = self._whole()
            version, file = self._page.told()
            if sequence is None or version == self.version:
                return None
            self._map(file)
            changes = self._changed(version)
            if self._page.sequence == sequence:
                seen = Seen(
                    self.version if changes is not None else None, version, self, sequence, changes
                )
                self.version = version
                return seen

    def newest(self) -> Version | None:
        """Return the version that is there now; None if there is none, or it is being written.

        Raises
        ------
        InputError
            If the mirror was removed.
        """
        if not self._page.is_there:
            self._page = self._opened()
        sequence = self._page.sequence
        version, file = self._page.told()
        is_whole = file and sequence % 2 == 0 and self._page.sequence == sequence
        return version if is_whole else None

    def is_sound(self) -> bool:
        """Read all weights, and tell whether they are the version that the mirror says.

        Errors are those of `update`.
        """
        while True:
            sequence = self._whole()
            if sequence is None:
                return False
            version, _ = self._page.told()
            try:
                found = is_version(File(self._folder.mapped(WEIGHTS), WEIGHTS), version)
            except (FormatError, FileNotFoundError):
                return False
            if self._page.sequence == sequence:
                return found

    def _opened(self) -> Page:
        """Begin with the mirror that is there now, and return its page."""
        self.version, self._tensors = None, {}
        self._file, self._owners = 0, dict[str, str]()
        try:
            return Page(self._folder.path / PAGE, writes=False)
        except FileNotFoundError:
            raise InputError(
                f"there is no mirror in {self._folder}; start a Follower on this host first"
            ) from None

    def _map(self, file: int) -> None:
        """Map the weights, if these are in another file by now."""
        if file != self._file:
            try:
                self._tensors = _mapped_tensors(self._folder.path / WEIGHTS)
            except FileNotFoundError:
                raise VersionError(
                    f"{self._folder} lacks {WEIGHTS}, which it says it has; remove the folder, and"
                    " start its follower again"
                ) from None
            self._file, self._owners = file, owners(parts_of(self._tensors))

    def _whole(self) -> int | None:
        """Wait until no version is being written, and return the sequence's number.

        Returns None if there never was a version.
        """
        until = time.monotonic() + _PATIENCE
        while (sequence := self._page.sequence) % 2:
            if sequence == 1 and not self._page.told()[1]:
                return None
            if time.monotonic() > until:
                raise VersionError(
                    f"a version is being written to {self._folder} for {_PATIENCE:g} seconds; if"
                    " its follower has died, start another one, which makes the mirror whole"
                )
            time.sleep(1e-3)
        return sequence

    def _changed(self, version: Version) -> list[Change] | None:
        """Return what the versions since the last one have changed; None if that is not known."""
        steps = self._steps(version)
        if steps is None:
            return None
        places: dict[str, list[Tensor]] = {}
        try:
            for step in steps:
                for name, numbers in _mapped_tensors(self._folder.path / step).items():
                    places.setdefault(name, []).append(numbers.long())
        except FileNotFoundError:  # the follower keeps those of the last versions only
            return None
        told = []
        for name, owner in self._owners.items():
            if owner in places:
                numbers, tensor = torch.cat(places[owner]), self._tensors[name]
                if len(steps) > 1:
                    numbers = numbers.unique()
                values = bits_of(tensor).view(-1).index_select(0, numbers).view(tensor.dtype)
                tied = None if name == owner else owner
                shape = tuple(tensor.shape)
                told.append(Change(name, tensor.dtype, shape, numbers, values, False, tied))
        return told

    def _steps(self, version: Version) -> list[str] | None:
        """Return the files that tell all changes since the last version."""
        after = {
            versions[0]: (name, versions[1])
            for name in self._folder.names()
            if (versions := changes_of(name))
        }
        steps: list[str] = []
        at = self.version
        while at != version:
            if at not in after or len(steps) > len(after):
                return None
            name, at = after[at]
            steps.append(name)
        return steps

    def _check(self, seen: Seen) -> None:
        if self._page.sequence != seen._sequence:
            if self.version == seen.version:
                self.version = None
            raise VersionError(
                f"another version was written to {self._folder} while version {seen.version} was"
                " read; update again"
            )
