"""Stores and outputs as they are typed, and what is said of those that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sparcel.errors import InputError

if TYPE_CHECKING:
    from sparcel.delta import Index, Store


def open_store(place: str) -> Store:
    """Return the store at a path or URL; a folder need not be there yet.

    Raises
    ------
    InputError
        If it is a file.
    """
    from sparcel.delta import store_at

    if "://" not in place and Path(place).exists() and not Path(place).is_dir():
        raise InputError(f"{place} is a file; a store is a folder or a URL")
    return store_at(place)


def lacks_folder(place: str) -> bool:
    """Tell whether a store is a folder that is not there."""
    return "://" not in place and not Path(place).exists()


def index_of(place: str, store: Store) -> Index:
    """Return the index of a store.

    Raises
    ------
    FormatError, OSError
        If it is wrong, or cannot be read.
    InputError
        If there is none.
    """
    from sparcel.delta import read_index

    if lacks_folder(place):
        raise InputError(f"there is no folder {place}")
    try:
        index = read_index(store)
    except OSError as error:
        raise OSError(f"can't read {place}: {error.strerror or error}") from error
    if not index.entries:
        raise InputError(f"nothing was published to {place} yet: it has no index.json")
    return index


@contextmanager
def writing(output: Path | None) -> Iterator[None]:
    """Tell errors of the block as those of the output, not of a file that becomes it."""
    try:
        yield
    except OSError as error:
        if output is None:
            raise
        raise OSError(f"can't write {output}: {error.strerror or error}") from error
