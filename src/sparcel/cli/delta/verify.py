"""``sparcel delta verify``: reads all of a store, and tells what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparcel.cli.delta.checking import Checking, anchor_faults, delta_faults
from sparcel.cli.delta.checkpoints import is_delta, open_checkpoint, open_delta
from sparcel.cli.delta.places import index_of, lacks_folder, open_store
from sparcel.cli.delta.shown import console, size
from sparcel.errors import FormatError, InputError, SparcelError


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
        with shown.status(f"reading {place}"):
            try:
                what, faults = _file(Path(place)) if Path(place).is_file() else _store(place)
            except (SparcelError, OSError) as error:
                what, faults = "not read", [str(error)]
        for fault in faults:
            shown.print(f"{place}: {fault}")
        shown.print(f"{place}: {what}; {_count(faults)}")
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
            return f"a delta from version {base} to {version}", delta_faults([file], base, version)
        checkpoint = open_checkpoint(path)
    except FormatError as error:
        return "a file", [str(error)]
    if checkpoint.stated is None:
        found = checkpoint.version()
        return f"a checkpoint that states no version; its sum is {found.sum:016x}", []
    what = f"a checkpoint of version {checkpoint.stated}"
    return what, anchor_faults(checkpoint.tensors, checkpoint.stated)


def _store(place: str) -> tuple[str, list[str]]:
    """Return what a store is, and what is wrong with it."""
    if lacks_folder(place):
        raise InputError("there is no such file or folder")
    store = open_store(place)
    try:
        index = index_of(place, store)
    except FormatError as error:
        return "a store", [str(error)]
    checking = Checking(store)
    for entry in index.entries:
        checking.read(entry)
    checking.replay()
    versions = len({entry.version for entry in index.entries})
    kept = sum(entry.bytes for entry in index.entries)
    what = f"a store of {versions} versions in {size(kept)}, the newest is {index.newest}"
    return what, checking.faults
