"""The index of a store, as the one publisher that may change it knows it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from sparcel._checks import checked_whole
from sparcel.delta.chunk import MOST_NUMBER, Version
from sparcel.delta.files import File
from sparcel.delta.index import INDEX, Entry, Index, index_in, write_index
from sparcel.errors import FormatError, InputError, VersionError
from sparcel.stores import Folder, Store

_OURS = re.compile(
    r"(((?P<delta>delta-\d{10,}-\d{10,})|anchor-\d{10,})-[0-9a-f]{16}(\.\d{4,})?\.safetensors"
    rf"|{re.escape(INDEX)})(\.[0-9a-f]{{16}}\.part)?"
)
"""All files that publishers write, also those that a `Folder` has not yet renamed."""


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
    index
        As this publisher has read or written it last.
    """

    def __init__(self, store: Store, writer: str, lag: int) -> None:
        self._store, self._writer, self._lag = store, writer, lag
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
            return self._store.write(name, parts)

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
                if isinstance(self._store, Folder):
                    found = File(self._store.mapped(name), name).version()
                    if found != version:
                        raise FormatError(f"it holds {found}")
                elif name not in self._listed(name):
                    raise FileNotFoundError(name)
            except (OSError, FormatError) as error:
                raise InputError(
                    f"{self._store} does not hold {name} as it was written just now: {error};"
                    " all ranks and subscribers need the same place"
                ) from error
        self._proven = True

    @contextmanager
    def _telling_of_others(self) -> Iterator[None]:
        """Raise VersionError instead, if a file is missing because another publisher removed it."""
        try:
            yield
        except (FileNotFoundError, InputError) as error:
            there = index_in(self._store)
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
            self._store.remove(name)
        self._left, self._ended = set(), True

    def _replace(self, index: Index) -> None:
        index = index.by(self._writer)
        with self._store.alone(), self._telling_of_others():
            self._check(index_in(self._store))
            write_index(self._store, index)
            if not self.index.entries and index_in(self._store) != index:
                raise InputError(f"{self._store} does not hold {INDEX} as it was written just now")
        self.index = index

    def _ours(self, what: int | str = 0) -> set[str]:
        """Return the files that publishers have written, or those of a kind."""
        found = [(name, _OURS.fullmatch(name)) for name in self._listed()]
        return {name for name, match in found if match and match[what]}

    def _listed(self, *known: str) -> list[str]:
        """Return the names of all files, or those known where they cannot be listed."""
        with suppress(InputError):
            return self._store.names()
        return list(known)

    def _read(self) -> Index:
        index = index_in(self._store)
        if index == Index() and self._ours("delta"):
            raise VersionError(
                f"{self._store} holds deltas, but not the {INDEX} that lists them; restore it from"
                " a copy, or remove all files to begin anew"
            )
        return index

    def _check(self, there: Index) -> None:
        if there != self.index:
            raise self._other(there)

    def _other(self, there: Index) -> VersionError:
        return VersionError(
            f"another publisher has written to {self._store}: its newest version is {there.newest};"
            " a store has one publisher at a time"
        )
