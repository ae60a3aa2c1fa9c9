"""``sparcel delta verify``: reads all of a store, and tells what is wrong."""

from __future__ import annotations

import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparcel.errors import FormatError, InputError, SparcelError, VersionError, public_url
from sparcel.tools.cli.delta.places import (
    console,
    index_of,
    is_delta,
    lacks_folder,
    open_checkpoint,
    open_delta,
    open_store,
    size,
)

if TYPE_CHECKING:
    from sparcel.products.delta import Entry, Store, Version
    from sparcel.products.delta.files import File


def verify(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="STORE|FILE...",
            help="Stores, which are folders or URLs, or single files: deltas and checkpoints.",
            show_default=False,
        ),
    ],
) -> None:
    """Read everything in a store, or in a file, and tell what is wrong with it.

    Compares all checksums. In a store, also applies each delta to the version that it is for, and
    compares the weights with the sum of the version that it makes, as those who serve the model
    would. This takes memory for the model, or what of it changes. The exit status is 1 if something
    is wrong, or cannot be read.
    """
    shown = console()
    wrong = False
    for place in places:
        told = public_url(place)
        with shown.status(f"reading {told}"):
            try:
                what, faults = _file(Path(place)) if Path(place).is_file() else _store(place)
            except (SparcelError, OSError) as error:
                what, faults = "not read", [str(error)]
        for fault in faults:
            shown.print(f"{told}: {fault}")
        count = {0: "nothing is wrong", 1: "1 fault"}.get(len(faults), f"{len(faults)} faults")
        shown.print(f"{told}: {what}; {count}")
        wrong = wrong or bool(faults)
    if wrong:
        raise typer.Exit(1)


def _file(path: Path) -> tuple[str, list[str]]:
    """Return what a file is, and what is wrong with it."""
    what = "a file"
    try:
        if is_delta(path):
            from sparcel.products.delta.kept import read_chunks

            file = open_delta(path)
            base, version = file.version("base"), file.version()
            what = f"a delta from version {base} to {version}"
            read_chunks([file], base, version)
            return what, []
        checkpoint = open_checkpoint(path)
        found, stated = checkpoint.version(), checkpoint.stated
    except FormatError as error:
        return what, [str(error)]
    if stated is None:
        return f"a checkpoint that states no version; its sum is {found.sum:016x}", []
    what = f"a checkpoint of version {stated}"
    return what, [] if found == stated else [f"the weights are {found} instead of version {stated}"]


def _store(place: str) -> tuple[str, list[str]]:
    """Return what a store is, and what is wrong with it."""
    if lacks_folder(place):
        raise InputError("there is no such file or folder")
    store = open_store(place)
    try:
        index = index_of(place, store)
    except FormatError as error:
        return "a store", [str(error)]
    checking = _Checking(store, index.entries)
    checking.check()
    versions = len({entry.version for entry in index.entries})
    kept = sum(entry.bytes for entry in index.entries)
    what = f"a store of {versions} versions in {size(kept)}, the newest is {index.newest}"
    return what, checking.faults


class _Checking:
    """Goes to all versions of a store by all its files, and notes what is wrong with these."""

    def __init__(self, store: Store, entries: tuple[Entry, ...]) -> None:
        from sparcel.products.delta import Subscriber

        self.faults: list[str] = []
        self._store, self._usable = store, list(entries)
        self._reader = Subscriber(store)

    def check(self) -> None:
        """Read each whole model, and try each delta on the version that it is for.

        Of the deltas from a version, the one to the next version comes last, and stays applied.
        """
        for entry in [entry for entry in self._usable if entry.base is None]:
            self._step(entry, apply=False)
        deltas = [(one.base, one) for one in self._usable if one.base is not None]
        deltas.sort(key=lambda pair: (pair[0].number, -pair[1].version.number))
        after = [base for base, _ in deltas[1:]]
        for (base, entry), next_base in zip_longest(deltas, after):
            if not self._go_to(base):
                self._read_alone(entry, base)
            elif self._step(entry) and next_base == base:
                self._reader.rollback()

    def _go_to(self, version: Version) -> bool:
        """Make a version by the files that are not known to be wrong."""
        from sparcel.products.delta import Index

        try:
            while way := Index(tuple(self._usable)).way(self._reader.version, version):
                self._step(way[0])
        except VersionError:  # nothing leads there
            return False
        return True

    def _step(self, entry: Entry, apply: bool = True) -> bool:
        """Read an entry as subscribers do; if it is wrong, note that, and use it no more."""
        from sparcel.products.delta import Ready

        reader, files = self._reader, self._open(entry)
        if files is None:
            return False
        try:
            if entry.base is None and files[0].whole:
                files[0].block_sums(entry.version)
            read = reader._kept.read(entry, files, reader.version, entry.version)
            if apply:
                Ready(reader, reader.version, *read).apply()
        except (FormatError, VersionError) as error:
            self._fault(entry, str(error))
            return False
        return True

    def _read_alone(self, entry: Entry, base: Version) -> None:
        """Check a delta whose base cannot be made."""
        from sparcel.products.delta.kept import check_stated, read_chunks

        files = self._open(entry)
        if files is None:
            return
        try:
            check_stated(entry, files)
            read_chunks(files, base, entry.version)
        except FormatError as error:
            self._fault(entry, str(error))
        else:
            self._fault(entry, f"nothing sound leads to its base, version {base}")

    def _open(self, entry: Entry) -> list[File] | None:
        from sparcel.products.delta import read_index
        from sparcel.products.delta.kept import files_of
        from sparcel.products.stores import mapped

        try:
            files = files_of(
                self._store, entry, sys.maxsize, lambda store, name, _: mapped(store, name)
            )
        except FileNotFoundError:
            if entry in read_index(self._store).entries:  # so it was not removed meanwhile
                self._fault(entry, "the index lists it, and it is missing")
            else:
                self._usable.remove(entry)
            return None
        except (FormatError, OSError) as error:
            self._fault(entry, str(error))
            return None
        length = sum(file.taken for file in files)
        if length != entry.bytes:
            self._fault(entry, f"it has {length} bytes instead of {entry.bytes}")
            return None
        return files

    def _fault(self, entry: Entry, fault: str) -> None:
        """Note what is wrong with an entry, which is then used no more."""
        names = ", ".join(entry.names)
        self.faults.append(fault if names in fault else f"{names}: {fault}")
        self._usable.remove(entry)
