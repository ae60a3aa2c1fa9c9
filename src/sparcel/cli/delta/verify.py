"""``sparcel delta verify``: reads all of a store, and tells what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparcel.cli.delta.places import (
    console,
    index_of,
    is_delta,
    lacks_folder,
    open_checkpoint,
    open_delta,
    open_store,
    size,
)
from sparcel.errors import FormatError, InputError, SparcelError, VersionError, public_url

if TYPE_CHECKING:
    from torch import Tensor

    from sparcel.delta import Entry, Store, Version
    from sparcel.delta.files import File


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
        shown.print(f"{told}: {what}; {_count(faults)}")
        wrong = wrong or bool(faults)
    if wrong:
        raise typer.Exit(1)


def _count(faults: list[str]) -> str:
    if not faults:
        return "nothing is wrong"
    return "1 fault" if len(faults) == 1 else f"{len(faults)} faults"


def _file(path: Path) -> tuple[str, list[str]]:
    """Return what a file is, and what is wrong with it."""
    try:
        if is_delta(path):
            file = open_delta(path)
            base, version = file.version("base"), file.version()
            return f"a delta from version {base} to {version}", _delta_faults([file], base, version)
        checkpoint = open_checkpoint(path)
    except FormatError as error:
        return "a file", [str(error)]
    if checkpoint.stated is None:
        found = checkpoint.version()
        return f"a checkpoint that states no version; its sum is {found.sum:016x}", []
    what = f"a checkpoint of version {checkpoint.stated}"
    return what, _anchor_faults(checkpoint.tensors, checkpoint.stated)


def _store(place: str) -> tuple[str, list[str]]:
    """Return what a store is, and what is wrong with it."""
    if lacks_folder(place):
        raise InputError("there is no such file or folder")
    store = open_store(place)
    try:
        index = index_of(place, store)
    except FormatError as error:
        return "a store", [str(error)]
    checking = _Checking(store)
    for entry in index.entries:
        checking.read(entry)
    checking.replay()
    versions = len({entry.version for entry in index.entries})
    kept = sum(entry.bytes for entry in index.entries)
    what = f"a store of {versions} versions in {size(kept)}, the newest is {index.newest}"
    return what, checking.faults


class _Checking:
    """What is wrong with the files of a store."""

    def __init__(self, store: Store) -> None:
        self.faults: list[str] = []
        self._store = store
        self._sound: list[Entry] = []
        self._left: list[Entry] = []
        """Deltas that were not tried yet."""
        self._ways: dict[Version, list[Entry]] = {}
        """How each version can be made: by a whole model, and the deltas after it."""

    def read(self, entry: Entry) -> None:
        """Check the files of an entry against what the index and the files state."""
        files = self._open(entry)
        if files is None:
            return
        try:
            faults = self._contents(entry, files)
        except (FormatError, VersionError) as error:
            faults = [str(error)]
        for fault in faults:
            self._fault(entry, fault)
        if not faults:
            self._sound.append(entry)

    def _open(self, entry: Entry) -> list[File] | None:
        from sparcel.delta import read_index
        from sparcel.delta.files import File
        from sparcel.stores import mapped

        try:
            data = [(name, mapped(self._store, name)) for name in entry.names]
            files = [File(one, name) for name, one in data]
        except FileNotFoundError:
            if entry in read_index(self._store).entries:  # so it was not removed meanwhile
                self._fault(entry, "the index lists it, and it is missing")
            return None
        except (FormatError, OSError) as error:
            self._fault(entry, str(error))
            return None
        length = sum(len(one) for _, one in data)
        if length != entry.bytes:
            self._fault(entry, f"it has {length} bytes instead of {entry.bytes}")
            return None
        return files

    def _contents(self, entry: Entry, files: list[File]) -> list[str]:
        from sparcel.delta.kept import check_stated, whole_of

        check_stated(entry, files)
        if entry.base is None and files[0].whole:
            files[0].block_sums(entry.version)
            return _anchor_faults(whole_of(files), entry.version)
        base = entry.base or files[0].version("base")
        faults = _delta_faults(files, base, entry.version)
        return faults or ([] if entry.base else _anchor_faults(whole_of(files), entry.version))

    def replay(self) -> None:
        """Go from each whole model along the deltas, and try each delta that can be reached.

        A chain of deltas is followed to its end. What other sound deltas make is made anew, for
        those deltas that begin there and were not tried.
        """
        self._left = [entry for entry in self._sound if entry.base is not None]
        self._ways = {entry.version: [entry] for entry in self._sound if entry.base is None}
        while starts := [one.base for one in self._left if one.base in self._ways]:
            start = min(starts, key=lambda version: (len(self._ways[version]), version.number))
            tensors = self._made(self._ways[start])
            if tensors is None:
                del self._ways[start]
            else:
                self._follow(start, tensors)
        for entry in self._left:
            self._fault(entry, f"nothing sound leads to its base, version {entry.base}")

    def _made(self, way: list[Entry]) -> dict[str, Tensor] | None:
        """Make a version by a whole model and deltas, if these are still what they were."""
        from sparcel.delta.kept import whole_of

        anchor, *steps = way
        files = self._open(anchor)
        if files is None:
            return None
        tensors = whole_of(files)
        return tensors if all(self._apply(step, tensors, undo=False) for step in steps) else None

    def _follow(self, now: Version, tensors: dict[str, Tensor]) -> None:
        """Try the deltas from a version, and go on from the nearest version that they reach."""
        reached: Version | None = now
        while reached is not None:
            now, reached = reached, None
            steps = sorted(
                (entry for entry in self._left if entry.base == now),
                key=lambda entry: entry.version.number,
                reverse=True,
            )
            sound = [step for step in steps if self._apply(step, tensors, undo=step != steps[-1])]
            self._left = [entry for entry in self._left if entry not in steps]
            for step in sound:
                self._ways.setdefault(step.version, [*self._ways[now], step])
            if sound and (sound[-1] == steps[-1] or self._apply(sound[-1], tensors, undo=False)):
                reached = sound[-1].version

    def _apply(self, entry: Entry, tensors: dict[str, Tensor], undo: bool) -> bool:
        """Apply a delta, or only try it, and tell whether it makes the version that it should."""
        from sparcel.delta import apply_

        files = self._open(entry)
        if files is None:
            return False
        try:
            made = apply_(tensors, [chunk for file in files for chunk in file.chunks()], entry.base)
        except (FormatError, VersionError) as error:
            self._fault(entry, str(error))
            return False
        right = made.version == entry.version
        if not right:
            self._fault(entry, f"it makes version {made.version} instead of {entry.version}")
        if undo or not right:
            made.undo()
        return right

    def _fault(self, entry: Entry, fault: str) -> None:
        names = ", ".join(entry.names)
        self.faults.append(fault if names in fault else f"{names}: {fault}")


def _anchor_faults(tensors: Mapping[str, Tensor], stated: Version) -> list[str]:
    """Compare the sum of all weights with that of the version that they should be."""
    from sparcel.delta import version_of

    found = version_of(tensors, stated.number)
    return [] if found == stated else [f"the weights are {found} instead of version {stated}"]


def _delta_faults(files: list[File], base: Version, version: Version) -> list[str]:
    """Compare the checksums of chunks, and the versions that they and the file state."""
    from sparcel.delta.chunk import read_chunk

    faults, total = [], 0
    for file in files:
        for number, data in enumerate(file.chunks()):
            try:
                chunk = read_chunk(data)
            except FormatError as error:
                faults.append(f"chunk {number}: {error}")
                continue
            total += chunk.sum
            if (chunk.base, chunk.target) != (base, version.number):
                faults.append(
                    f"chunk {number} makes version {chunk.target} of version {chunk.base}, instead"
                    f" of {version.number} of {base}"
                )
    made = base.after(version.number, total)
    if not faults and made != version:
        faults.append(
            f"its chunks make version {made} instead of {version}: one is missing, or there twice"
        )
    return faults
