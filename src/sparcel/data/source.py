"""The dataset whose samples are kept."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from sparcel.data.records import pack
from sparcel.errors import InputError, warn

VERSION = 1
"""Of records and of the database that they are in."""


class Source:
    """Reads samples of a map-style dataset, and compares them with those read before.

    Raises
    ------
    InputError
        When the dataset is not map-style, or its length is unknown.
    """

    def __init__(self, dataset: Dataset[Any], threads: int) -> None:
        kind = type(dataset).__name__
        wanted = "dataset must be map-style, with len(dataset) and dataset[i]"
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise InputError(f"{wanted}; {kind} has no samples by number")
        try:
            self.length = len(dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError) as error:
            raise InputError(f"{wanted}; {kind} has no length: {error}") from error
        self._dataset, self._threads = dataset, threads
        self._said_random = False

    def identity(self, version: str) -> str:
        """Return what a copy of the samples is of."""
        kind = type(self._dataset).__qualname__
        about = {"dataset": kind, "length": self.length, "version": version, "format": VERSION}
        parts = _parts(self._dataset)
        if len(parts) > 1 or parts[0][2] is not None:
            text = json.dumps(parts, default=_for_json, skipkeys=True)
            about["parts"] = blake2b(text.encode(), digest_size=8).hexdigest()
        return json.dumps(about)

    def read(self, places: Sequence[int]) -> Sequence[Any]:
        """Return the samples of some places."""
        if self._threads > 1 and len(places) > 1:
            with ThreadPoolExecutor(min(self._threads, len(places))) as pool:
                return [*pool.map(self._dataset.__getitem__, places)]
        together = getattr(self._dataset, "__getitems__", None)
        if together is None:
            return [self._dataset[place] for place in places]
        found = list(together(places))
        if len(found) != len(places):
            raise InputError(
                f"dataset.__getitems__ must give a sample for each of {len(places)} indices, got"
                f" {len(found)}"
            )
        return found

    def still_has(self, place: int, record: bytes) -> bool:
        """Tell whether a sample is the one of a record; warn if it changes at each access."""
        sample = pack(place, self._dataset[place])
        if sample == record:
            return True
        is_random = sample != pack(place, self._dataset[place])
        if is_random and not self._said_random:
            self._said_random = True
            warn(
                f"dataset[{place}] is another sample at each access, and Cached keeps the first"
                " one; do what is random in transform="
            )
        return is_random


def _parts(dataset: Dataset[Any]) -> list[tuple[Any, ...]]:
    """Describe a dataset and those inside it, each once: class, length, indices, what is inside.

    These tell apart what has the same class and length, such as the folds of one dataset, which
    have indices as a `Subset` does.
    """
    parts, found, numbers = [], [dataset], {id(dataset): 0}
    for one in found:  # grows meanwhile
        inside = []
        for other in _inside(one):
            inside.append(numbers.setdefault(id(other), len(found)))
            if inside[-1] == len(found):
                found.append(other)
        indices = getattr(one, "__dict__", {}).get("indices")
        parts.append((type(one).__qualname__, _length(one), indices, inside))
    return parts


def _inside(dataset: Dataset[Any]) -> Iterator[Dataset[Any]]:
    """Iterate over the datasets that are attributes, or in a list or dict that is one."""
    for _, value in sorted(getattr(dataset, "__dict__", {}).items()):
        several = value.values() if isinstance(value, dict) else value
        for one in several if isinstance(value, dict | list | tuple) else [value]:
            if isinstance(one, Dataset):
                yield one


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a part need not have one, nor be open
        return None


def _for_json(value: Any) -> Any:
    """Return what JSON holds for an array, a tensor or a number of theirs, or a range."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Set):
        return sorted(map(repr, value))  # in one order in all processes
    return list(value) if isinstance(value, Collection) else type(value).__qualname__
