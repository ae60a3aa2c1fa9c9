"""``sparcel delta log``, ``watch`` and ``verify``: the versions of a store, listed and checked."""

from __future__ import annotations

import signal
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from sparcel.core import units
from sparcel.core._files import replacing
from sparcel.errors import FormatError, InputError, SparcelError, VersionError, public_url
from sparcel.tools.cli.delta.places import (
    StorePlace,
    age,
    bits_each,
    console,
    index_of,
    is_delta,
    lacks_folder,
    open_checkpoint,
    open_delta,
    open_store,
    share,
    size,
    writing,
)
from sparcel.tools.cli.options import check_output

if TYPE_CHECKING:
    from sparcel.products.delta import Entry, Index, Store, Version
    from sparcel.products.delta.files import File


_FILE = "model.safetensors"


def log(store: StorePlace) -> None:
    """List the versions of a store: whole models, and deltas from one version to another.

    A delta is much smaller than a whole model; bits is how much it spends on each changed element.
    """
    index = index_of(store, open_store(store))
    shown = console()
    shown.print(_table(index))
    kept = sum(entry.bytes for entry in index.entries)
    shown.print(f"The newest version is {index.newest}. All files take {size(kept)}.")


def _table(index: Index) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("version", "from", "", "changed", "bits", "bytes", "age"):
        table.add_column(heading, justify="left" if not heading else "right")
    now = time.time()
    for entry in index.entries:
        told = ("", "whole model", "", "")
        if entry.base is not None:
            changed = share(entry.changed, entry.elements)
            told = str(entry.base.number), "delta", changed, bits_each(entry.bytes, entry.changed)
        number, since = str(entry.version.number), age(now - entry.time)
        table.add_row(number, *told, size(entry.bytes), since)
    return table


def watch(
    store: StorePlace,
    every: Annotated[str, typer.Option(help="How often to look for new versions: 500ms.")] = "2s",
    output: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder in which to keep the newest version as {_FILE}; it is made if it is not "
            "there. The file is replaced as a whole, so whoever opens it finds one version.",
        ),
    ] = None,
    mirror: Annotated[
        Path | None,
        typer.Option(
            help="Folder on this host, as in /dev/shm, in which to keep the newest version for all "
            "processes that open it by `sparcel.delta.Mirror`: only what changes is written.",
        ),
    ] = None,
) -> None:
    """Follow a store, and print a line for each new version, until Ctrl-C.

    Begins with the newest version. If the store cannot be read, says so and goes on trying.
    """
    seconds = units.seconds(every)
    if not seconds:
        raise InputError(f"--every must be more than 0s, got {every}")
    if output is not None:
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
        check_output(output / _FILE)
    watching = _Watching(store, output and output / _FILE, mirror)
    before = signal.signal(signal.SIGINT, watching.interrupt)
    try:
        watching.go_on(seconds)
    except KeyboardInterrupt:
        pass  # how a watch ends
    finally:
        signal.signal(signal.SIGINT, before)
        watching.close()


class _Watching:
    def __init__(self, place: str, file: Path | None, mirror: Path | None) -> None:
        from sparcel.products.delta import Follower, Subscriber

        self._place, self._store, self._file = place, open_store(place), file
        self._console = console()
        self._shown: Version | None = None
        self._said = ""
        self._written: Version | None = None
        self._subscriber = Subscriber(self._store)
        with writing(mirror):
            self._follower = None if mirror is None else Follower(self._store, mirror)
        self._idle = self._interrupted = False

    def go_on(self, every: float) -> None:
        while not self._interrupted:
            try:
                self._look()
            except (FormatError, VersionError, OSError) as error:
                self._say(f"{error}; trying again")
            self._idle = True
            if not self._interrupted:
                time.sleep(every)
            self._idle = False

    def interrupt(self, *_: object) -> None:
        """End the wait for the next look, or let a look end first, unless asked again.

        An exception that a signal raises among threads that work can leave a lock behind.
        """
        again, self._interrupted = self._interrupted, True
        if again or self._idle:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Let another process follow."""
        if self._follower is not None:
            self._follower.close()

    def _look(self) -> None:
        from sparcel.products.delta import read_index

        index = read_index(self._store)
        if index.newest is None:
            if lacks_folder(self._place):
                self._say(f"there is no folder {self._place} yet; waiting for it")
            else:
                self._say(f"{public_url(self._place)} has no versions yet; waiting for the first")
            return
        if self._file is not None:
            self._keep(self._file)
        if self._follower is not None:
            self._follower.update()
        self._show(index)
        self._said = ""

    def _keep(self, file: Path) -> None:
        """Make the file the newest version."""
        from sparcel.products.delta.files import anchor_file

        reader = self._subscriber
        reader.update()
        if reader.version is None or reader.version == self._written:
            return
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as written:
                written.writelines(anchor_file(reader.tensors, reader.version))
        self._written = reader.version

    def _show(self, index: Index) -> None:
        """Print a line for each version that was not shown; at first for the newest."""
        newest, shown = index.newest, self._shown
        assert newest is not None, "there is a version"
        is_later = shown is not None and (shown == newest or shown.number < newest.number)
        after = shown.number if shown and is_later else newest.number - 1  # or of another run
        # Of the entries of a version, the last one stays.
        best = {entry.version.number: entry for entry in sorted(index.entries, key=_rank)}
        for number in sorted(best):
            if number > after:
                self._console.print(_line(best[number]))
        self._shown = newest

    def _say(self, what: str) -> None:
        """Print something once, not each time the store is looked at."""
        if what != self._said:
            self._console.print(what)
        self._said = what


def _rank(entry: Entry) -> int:
    """Rank the delta from the nearest version above other deltas, and these above whole models."""
    return -1 if entry.base is None else entry.base.number


def _line(entry: Entry) -> str:
    if entry.base is None:
        what = "whole model"
    else:
        what = f"{share(entry.changed, entry.elements)} changed since {entry.base.number}"
    when = time.strftime("%H:%M:%S", time.localtime(entry.time))
    return f"{when}  version {entry.version}: {what}, {size(entry.bytes)}"


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
