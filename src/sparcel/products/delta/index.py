"""The list of versions in a store, and the ways from one to another.

A version exists once the index lists its files, which are written before. So the index is what a
publisher commits with, and all that a subscriber needs to know.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from sparcel.core._checks import checked_whole
from sparcel.errors import FormatError, InputError, VersionError, few
from sparcel.products.delta.chunk import MOST_NUMBER, Version
from sparcel.products.delta.files import File
from sparcel.products.delta.header import is_too_nested, loads, malformed, whole
from sparcel.products.stores import DoubtedStore, Folder, Store, read_at_most, store_at

INDEX = "index.json"
_FORMAT = "sparcel-delta-1"
_MOST_BYTES = 32 << 20
"""Of an index: hundreds of entries of thousands of processes take less."""

_MOST_SECONDS = 1 << 40
_PLAIN = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
"""Names of files that are in the store itself, on any file system."""

_OURS = re.compile(
    r"(((?P<delta>delta-\d{10,}-\d{10,})|anchor-\d{10,})-[0-9a-f]{16}(\.\d{4,})?\.safetensors"
    rf"|{re.escape(INDEX)})(\.[0-9a-f]{{16}}\.part)?"
)
"""All files that publishers write, also those that a `Folder` has not yet renamed."""


@dataclass(frozen=True)
class Entry:
    """An anchor, which is a whole model, or a delta from the version ``base``.

    Attributes
    ----------
    names
        Its files; several processes write one each.
    bytes
        Length of the files together.
    elements, changed
        Of the model, and of it those that differ from the base.
    time
        When it was published, in seconds since 1970.
    """

    kind: str
    base: Version | None
    version: Version
    names: tuple[str, ...]
    bytes: int
    elements: int
    changed: int
    time: float


@dataclass(frozen=True)
class Index:
    """All versions that a store has: the entries in the order in which they were published.

    Attributes
    ----------
    entries
        Anchors and deltas.
    writer
        Tells the publisher that wrote it.
    """

    entries: tuple[Entry, ...] = ()
    writer: str = ""

    @property
    def newest(self) -> Version | None:
        """The newest version, or None if there is none."""
        versions = [entry.version for entry in self.entries]
        return max(versions, key=lambda version: version.number, default=None)

    @property
    def names(self) -> set[str]:
        """The names of all files."""
        return {name for entry in self.entries for name in entry.names}

    def by(self, writer: str) -> Index:
        """Return the index as another publisher's."""
        return replace(self, writer=writer)

    def with_entries(self, *entries: Entry) -> Index:
        """Return the index with more entries."""
        return replace(self, entries=(*self.entries, *entries))

    def pruned(self, lag: int) -> Index:
        """Return the index without what no reader needs who is at most ``lag`` versions behind.

        All is kept from the last anchor on that was there when the newest version but ``lag`` was.
        So whoever has one of the last versions finds every delta since, and whoever began to read
        an anchor when it was the newest one has ``lag`` versions' time for it.
        """
        numbers = sorted({entry.version.number for entry in self.entries})
        oldest = numbers[max(len(numbers) - 1 - lag, 0)] if numbers else 0
        anchors = [e.version.number for e in self.entries if e.kind == "anchor"]
        first = max((number for number in anchors if number <= oldest), default=0)
        kept = tuple(
            entry
            for entry in self.entries
            if (entry.base or entry.version).number >= first and entry.version.number >= first
        )
        return replace(self, entries=kept)

    def way(
        self, since: Version | None, to: int | Version | None = None, without: Collection[str] = ()
    ) -> list[Entry]:
        """Return the entries that lead to a version, with the fewest bytes.

        Parameters
        ----------
        since
            The version to start from, or None. Anchors need none.
        to
            The version wanted, or its number; by default the newest.
        without
            Files that must not be used.

        Raises
        ------
        VersionError
            If no way leads there.
        """
        wanted = self.numbered(to) if isinstance(to, int) else to or self.newest
        if wanted is None or wanted == since:
            return []
        best: dict[Version | None, tuple[int, list[Entry]]] = {None: (0, []), since: (0, [])}
        usable = [entry for entry in self.entries if not set(entry.names) & set(without)]
        for entry in sorted(usable, key=lambda e: (e.version.number, (e.base or e.version).number)):
            start = best.get(entry.base)
            if start is None:
                continue
            cost = start[0] + entry.bytes
            if entry.version not in best or cost < best[entry.version][0]:
                best[entry.version] = (cost, [*start[1], entry])
        if wanted not in best:
            raise VersionError(self._no_way(since, wanted, without))
        return best[wanted][1]

    def numbered(self, number: int) -> Version:
        """Return the version with a number, or raise VersionError."""
        for entry in self.entries:
            if entry.version.number == number:
                return entry.version
        numbers = sorted({entry.version.number for entry in self.entries})
        there = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise VersionError(f"there is no version {number}; the store has {there}")

    def _no_way(self, since: Version | None, wanted: Version, without: Collection[str]) -> str:
        start = "nothing" if since is None else f"version {since}"
        anchors = [entry.version.number for entry in self.entries if entry.kind == "anchor"]
        newest = ", ".join(few(sorted(anchors, reverse=True))) or "none"
        useless = f"; {', '.join(few(sorted(without)))} cannot be used" if without else ""
        return (
            f"no files lead from {start} to version {wanted}: the newest whole models are of"
            f" versions {newest}{useless}; wait for the next whole model; a publisher that is"
            " restarted makes one at once if it cannot read the newest version either"
        )


def read_index(store: Store | str | os.PathLike[str]) -> Index:
    """Return the index of a store; it is empty if nothing was published.

    Raises
    ------
    FormatError
        If it cannot be read.
    InputError
        If nothing can ever appear there: the bucket, or the folder around it, does not exist.
    """
    store = store_at(store)
    index = index_in(store)
    if index == Index() and isinstance(store, DoubtedStore):
        store.check_found()
    return index


def index_in(store: Store) -> Index:
    """Return the index of a store, which may be a place that its publisher has yet to make."""
    try:
        text = bytes(read_at_most(store, INDEX, _MOST_BYTES))
    except FileNotFoundError:
        return Index()
    way_out = f"restore {INDEX} from a copy, or publish to an empty place"
    with malformed(f"the index of {store} is wrong", way_out):
        told = loads(text)
        if told["format"] != _FORMAT:
            raise ValueError(f"format {told['format']!r} instead of {_FORMAT!r}")
        return Index(tuple(_entry(one) for one in told["entries"]), str(told["writer"]))


def write_index(store: Store, index: Index) -> None:
    """Replace the index of a store, which commits what it lists."""
    entries = [vars(entry) for entry in index.entries]
    told = {"format": _FORMAT, "writer": index.writer, "entries": entries}
    text = json.dumps(told, indent=1, default=Version.stated).encode()
    if len(text) > _MOST_BYTES or is_too_nested(text):
        raise InputError(
            f"the index would take {len(text)} bytes, of which readers take {_MOST_BYTES}; let"
            " fewer processes publish, or lower lag or anchor_every"
        )
    store.write(INDEX, [text])


def _entry(told: dict[str, Any]) -> Entry:
    base = None if told["base"] is None else Version.read(told["base"])
    made = Version.read(told["version"])
    kind = "delta" if base else "anchor"
    if told["kind"] != kind or (base and base.number >= made.number):
        raise ValueError(f"an entry of kind {told['kind']!r} from {base} to {made}")
    names = tuple(told["names"])
    if not names or not all(_PLAIN.fullmatch(name) and name != INDEX for name in names):
        raise ValueError(f"files named {few(names)}")
    size, elements, changed = (whole(told[what]) for what in ("bytes", "elements", "changed"))
    when = float(told["time"])
    if not 0 <= when < _MOST_SECONDS:
        raise ValueError(f"an entry of the time {when}")
    return Entry(kind, base, made, names, size, elements, changed, when)


def file_name(base: Version | None, number: int, writer: str, rank: int | None = None) -> str:
    """Return the name of a file, which no other publisher writes."""
    what = f"anchor-{number:010}" if base is None else f"delta-{base.number:010}-{number:010}"
    return f"{what}-{writer}{'' if rank is None else f'.{rank:04}'}.safetensors"


class IndexWriter:
    """The index of a store as one publisher knows it, who alone may change it.

    Each change raises VersionError, and changes nothing, if somebody else has changed the index
    since. So does reading it, if it is lost.

    Parameters
    ----------
    store
        Where the index is.
    writer
        Tells this publisher from others: 16 hexadecimal digits.
    lag
        As for `Publisher`.

    Attributes
    ----------
    store
        Where the index is.
    index
        As this publisher has read or written it last.
    """

    def __init__(self, store: Store, writer: str, lag: int) -> None:
        self.store, self._writer, self._lag = store, writer, lag
        self._ended = self._proven = False
        self._left: set[str] = set()
        self.index = self._read()

    def begin(self, number: int | None = None) -> int:
        """Begin a publication with the index as it is, also if an error came after a commit.

        Returns the number of the next version, or the one asked for, if it can have that.
        """
        there = self._read()
        if there.writer != self._writer:
            self._check(there)
        self.index = there
        if not self._ended:
            # Whoever wrote these began before this publication. If it commits, they cannot.
            self._left = self._ours() - there.names - {INDEX}
        self._ended = False
        last = there.newest
        least = last.number + 1 if last else 0
        hint = f"versions are numbered upwards, and the last one is {last}" if last else ""
        return checked_whole(
            least if number is None else number, "number", least, MOST_NUMBER, hint
        )

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a file, and return its length."""
        with self._telling_of_others():
            return self.store.write(name, parts)

    def prove(self, name: str, version: Version) -> None:
        """Look at a file of the first version that is published, before it is committed.

        Raises
        ------
        InputError
            If it is not there, or not what was written, so that subscribers could not read it.
        """
        if self._proven:
            return
        with self._telling_of_others():
            try:
                if isinstance(self.store, Folder):
                    found = File(self.store.mapped(name), name).version()
                    if found != version:
                        raise FormatError(f"it holds {found}")
                elif name not in self._listed(name):
                    raise FileNotFoundError(name)
            except (OSError, FormatError) as error:
                raise InputError(
                    f"{self.store} does not hold {name} as it was written just now: {error};"
                    " all ranks and subscribers need the same place"
                ) from error
        self._proven = True

    @contextmanager
    def _telling_of_others(self) -> Iterator[None]:
        """Raise VersionError instead, if a file is missing because another publisher removed it."""
        try:
            yield
        except (FileNotFoundError, InputError) as error:
            there = index_in(self.store)
            if there.newest and there.writer != self._writer and there != self.index:
                raise self._other(there) from error
            raise

    def commit(
        self, base: Version | None, version: Version, names: tuple[str, ...], *counts: int
    ) -> None:
        """Add the entry of files that are written; counts are its bytes, elements and changes."""
        kind, (size, elements, changed) = "anchor" if base is None else "delta", counts
        entry = Entry(kind, base, version, names, size, elements, changed, time.time())
        self._replace(self.index.with_entries(entry))

    def prune(self) -> None:
        """Remove what nobody needs, from the index first, and end the publication."""
        kept = self.index.pruned(self._lag)
        dropped = self.index.names - kept.names
        if dropped:
            self._replace(kept)
        for name in dropped | self._left - kept.names:
            self.store.remove(name)
        self._left, self._ended = set(), True

    def _replace(self, index: Index) -> None:
        index = index.by(self._writer)
        with self.store.alone(), self._telling_of_others():
            self._check(index_in(self.store))
            write_index(self.store, index)
            if not self.index.entries and index_in(self.store) != index:
                raise InputError(f"{self.store} does not hold {INDEX} as it was written just now")
        self.index = index

    def _ours(self, what: int | str = 0) -> set[str]:
        """Return the files that publishers have written, or those of a kind."""
        found = [(name, _OURS.fullmatch(name)) for name in self._listed()]
        return {name for name, match in found if match and match[what]}

    def _listed(self, *known: str) -> list[str]:
        """Return the names of all files, or those known where they cannot be listed."""
        with suppress(InputError):
            return self.store.names()
        return list(known)

    def _read(self) -> Index:
        index = index_in(self.store)
        if index == Index() and self._ours("delta"):
            raise VersionError(
                f"{self.store} holds deltas, but not the {INDEX} that lists them; restore it from"
                " a copy, or remove all files to begin anew"
            )
        return index

    def _check(self, there: Index) -> None:
        if there != self.index:
            raise self._other(there)

    def _other(self, there: Index) -> VersionError:
        return VersionError(
            f"another publisher has written to {self.store}: its newest version is {there.newest};"
            " a store has one publisher at a time"
        )
