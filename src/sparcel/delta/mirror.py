"""One copy of the weights a host: a process keeps it at a store's versions, and others read it.

A mirror is a folder, best in memory. It has the weights in a safetensors file, which is written in
place; for each of the last versions, a file with the places of what changed; and a page that tells
the version, and by an odd number that the weights are just being written (a sequence lock).
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparcel.delta.applying import Prepared
from sparcel.delta.bits import bits_of
from sparcel.delta.chunk import Version
from sparcel.delta.decoding import Change
from sparcel.delta.files import File, anchor_file
from sparcel.delta.making import version_of
from sparcel.delta.parts import owners, parts_of
from sparcel.delta.subscriber import AHEAD, Ready, Subscriber
from sparcel.errors import FormatError, InputError, VersionError
from sparcel.stores import Folder, Store

_PAGE = "state"
_MAGIC = int.from_bytes(b"SPDmiror", "little")
_WORDS, _NAME = 8, 64
"""Numbers on the page, of 64 bits each, and the bytes of the name that follows."""
_CHANGES = re.compile(r"changes-(\d+)-([0-9a-f]{16})-(\d+)-([0-9a-f]{16})\.safetensors")
_KEPT = 4
"""Versions of which the places of changes are kept, for readers that are behind."""
_PATIENCE = 60.0
"""How many seconds a reader waits for weights that are being written."""


class _Page:
    """The page of a mirror, which one process writes and others read."""

    def __init__(self, path: Path, writes: bool) -> None:
        with _opened(path, writes) as data:
            self._words = np.frombuffer(data, np.uint64, _WORDS)
            self._name = np.frombuffer(data, np.uint8, _NAME, self._words.nbytes)
        if self._words[0] != _MAGIC:
            raise FormatError(f"{path} is no page of a mirror")

    @staticmethod
    def blank() -> bytes:
        """Return a page of which no version is told yet, as if it were being written."""
        words = np.array([_MAGIC, 1, *[0] * (_WORDS - 2)], np.uint64)
        return words.tobytes() + bytes(_NAME)

    @property
    def sequence(self) -> int:
        """A number that grows with each write, and is odd meanwhile."""
        return int(self._words[1])

    def told(self) -> tuple[Version, str]:
        """Return the version, and the name of the file with its weights."""
        number, total = (int(word) for word in self._words[2:4])
        return Version(number, total), self._name.tobytes().rstrip(b"\0").decode()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Tell readers to wait; after an error they go on waiting."""
        self._words[1] = self.sequence | 1
        yield
        self._words[1] = self.sequence + 1

    def tell(self, version: Version, name: str) -> None:
        """Note a version while it is being written."""
        self._words[2:4] = version.number, version.sum
        self._name[:] = np.frombuffer(name.encode().ljust(_NAME, b"\0"), np.uint8)


@contextmanager
def _opened(path: Path, writes: bool) -> Iterator[memoryview]:
    """Map a file that others change or read; what is made of its bytes keeps it mapped."""
    access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
    flags = os.O_RDWR if writes else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_NOFOLLOW)
    try:
        data = memoryview(mmap.mmap(descriptor, 0, access=access))
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        yield data


def _tensors(path: Path, writes: bool) -> dict[str, Tensor]:
    with _opened(path, writes) as data:
        return File(data, path.name).tensors()


class Follower:
    """Keeps a mirror at the versions of a store: one process a host, which others read by `Mirror`.

    The weights of the mirror are never between two versions where readers see them: they wait while
    a version is written, and for a new follower if this one dies meanwhile. A follower that starts
    goes on with a mirror that is whole, and else makes it anew.

    Parameters
    ----------
    store
        Where versions come from: as for `Subscriber`.
    place
        The mirror's folder, on this host: in memory, as in ``/dev/shm``, or on a disk. It has one
        follower at a time; another one that starts waits a minute for it to end.

    Attributes
    ----------
    version
        What the mirror is, or None.

    Raises
    ------
    InputError
        If another process follows.
    """

    def __init__(
        self, store: Store | str | os.PathLike[str], place: str | os.PathLike[str]
    ) -> None:
        self.version: Version | None = None
        self._store, self._folder = store, Folder(place)
        self._folder.lasting = False
        self._held = ExitStack()
        self._held.enter_context(self._folder.alone())
        self._subscriber: Subscriber | None = None
        try:
            if _PAGE not in self._folder.names():
                self._folder.write(_PAGE, [_Page.blank()])
            self._page = _Page(self._folder.path / _PAGE, writes=True)
            self._go_on()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process follow; the mirror stays."""
        self._held.close()

    def update(self, to: int | None = None) -> Version | None:
        """Go to the newest version, or to the one with the number ``to``.

        Returns the version, or None if nothing had to be done. Errors are those of
        `Subscriber.update`.
        """
        before = self.version
        if self._subscriber is None:
            self._begin(to)
        else:
            try:
                for ready in self._subscriber._steps(to, AHEAD):
                    self._write(self._subscriber, ready)
            except VersionError:  # its tensors are others, or no delta leads there
                self._begin(to)
        return self.version if self.version != before else None

    def _go_on(self) -> None:
        """Take the mirror as it is, if it is whole."""
        version, name = self._page.told()
        if self._page.sequence % 2 or not name:
            return
        try:
            tensors = _tensors(self._folder.path / name, writes=True)
        except (FormatError, OSError):
            return
        if version_of(tensors, version.number) == version:
            self._keep(version, tensors)

    def _begin(self, to: int | None) -> None:
        """Make the mirror anew, in another file: readers may still have the old one."""
        self._subscriber = self.version = None
        reader = Subscriber(self._store)
        reader.update(to)
        version = reader.version
        if version is None:
            return
        name = f"weights-{secrets.token_hex(8)}.safetensors"
        self._folder.write(name, anchor_file(reader.tensors, version))
        with self._page.writing():
            self._page.tell(version, name)
        self._keep(version, _tensors(self._folder.path / name, writes=True))
        for other in self._folder.names():
            if other not in (_PAGE, name):
                self._folder.remove(other)

    def _keep(self, version: Version, tensors: dict[str, Tensor]) -> None:
        self._subscriber = Subscriber(self._store, tensors)
        self._subscriber.version = self.version = version

    def _write(self, subscriber: Subscriber, ready: Ready) -> None:
        """Write a version, and before it where it differs from the one before."""
        base, step = self.version, ready._step
        self._subscriber = None  # until all is written
        if base is not None and isinstance(step, Prepared):
            self._folder.write(_changes_name(base, ready.version), _places_file(step))
        with self._page.writing():
            ready.apply()
            self._page.tell(ready.version, self._page.told()[1])
        self._subscriber, self.version = subscriber, ready.version
        logs = sorted(name for name in self._folder.names() if _CHANGES.fullmatch(name))
        for name in sorted(logs, key=_reached)[:-_KEPT]:
            self._folder.remove(name)


def _changes_name(base: Version, version: Version) -> str:
    told = "-".join(f"{one.number}-{one.sum:016x}" for one in (base, version))
    return f"changes-{told}.safetensors"


def _reached(name: str) -> int:
    match = _CHANGES.fullmatch(name)
    return int(match[3]) if match else -1


def _places_file(step: Prepared) -> Iterator[bytes | memoryview]:
    """Yield a file with the numbers of the elements that change in each tensor."""
    found: dict[str, list[Tensor]] = {}
    for name, numbers in step.places():
        found.setdefault(name, []).append(numbers)
    places = {name: torch.cat(parts) for name, parts in found.items()}
    narrow = {
        n: one.int() if not len(one) or int(one.max()) < 1 << 31 else one
        for n, one in places.items()
    }
    return anchor_file(narrow, step.version)


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
        for name, owner in owners(parts_of(self._mirror.tensors)).items():
            tied = None if name == owner else owner
            yield Change.whole(name, self._mirror.tensors[name], tied)
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
    tensors
        The weights by name, mapped: what they hold changes when another version is written.

    Raises
    ------
    InputError
        If nobody has made a mirror there.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.version: Version | None = None
        self.tensors: Mapping[str, Tensor] = {}
        self._folder, self._file = Folder(place), ""
        try:
            self._page = _Page(self._folder.path / _PAGE, writes=False)
        except FileNotFoundError:
            raise InputError(
                f"there is no mirror in {self._folder}; start a Follower on this host first"
            ) from None

    def update(self) -> Seen | None:
        """Find out what has changed since the last time; None if nothing has, or nothing is there.

        It reads what changed, and of the rest nothing. A reader that is several versions behind, or
        has none yet, is told all tensors whole.

        Raises
        ------
        VersionError
            If the weights are being written for a minute: their follower died, or is stopped.
        """
        while True:
            sequence = self._whole()
            version, name = self._page.told()
            if not name or version == self.version:
                return None
            if name != self._file:
                try:
                    self.tensors = _tensors(self._folder.path / name, writes=False)
                except FileNotFoundError:
                    if self._page.sequence != sequence:
                        continue  # the follower has gone on meanwhile
                    raise VersionError(
                        f"{self._folder} lacks {name}, which it says it has; remove the folder, and"
                        " start its follower again"
                    ) from None
                self._file = name
            changes = self._changed(version)
            if self._page.sequence == sequence:
                seen = Seen(
                    self.version if changes is not None else None, version, self, sequence, changes
                )
                self.version = version
                return seen

    def _whole(self) -> int:
        """Wait until no version is being written, and return the sequence's number."""
        until = time.monotonic() + _PATIENCE
        while (sequence := self._page.sequence) % 2:
            if sequence == 1 and not self._page.told()[1]:
                return sequence  # nothing was ever there
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
                for name, numbers in _tensors(self._folder.path / step, writes=False).items():
                    places.setdefault(name, []).append(numbers.long())
        except FileNotFoundError:  # the follower keeps those of the last versions only
            return None
        told = []
        for name, owner in owners(parts_of(self.tensors)).items():
            if owner in places:
                numbers, tensor = torch.cat(places[owner]), self.tensors[name]
                if len(steps) > 1:
                    numbers = numbers.unique()
                values = bits_of(tensor).view(-1).index_select(0, numbers).view(tensor.dtype)
                tied = None if name == owner else owner
                shape = tuple(tensor.shape)
                told.append(Change(name, tensor.dtype, shape, numbers, values, False, tied))
        return told

    def _steps(self, version: Version) -> list[str] | None:
        """Return the files that tell all changes since the last version."""
        after: dict[tuple[str, str], tuple[str, tuple[str, str]]] = {}
        for name in self._folder.names():
            if match := _CHANGES.fullmatch(name):
                after[match[1], match[2]] = (name, (match[3], match[4]))
        if self.version is None:
            return None
        steps: list[str] = []
        at, end = _key(self.version), _key(version)
        while at != end:
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


def _key(version: Version) -> tuple[str, str]:
    return str(version.number), f"{version.sum:016x}"
