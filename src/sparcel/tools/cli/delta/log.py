"""``sparcel delta log`` and ``sparcel delta watch``: the versions of a store."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from sparcel.core import units
from sparcel.core._files import replacing
from sparcel.errors import FormatError, InputError, VersionError, public_url
from sparcel.tools.cli.delta.places import (
    StorePlace,
    age,
    bits_each,
    console,
    index_of,
    lacks_folder,
    open_store,
    share,
    size,
    writing,
)
from sparcel.tools.cli.options import check_output

if TYPE_CHECKING:
    from sparcel.products.delta import Entry, Index, Version


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
