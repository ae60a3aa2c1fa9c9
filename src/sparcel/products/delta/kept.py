"""The weights that a subscriber keeps, and what files make of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparcel.errors import FormatError, InputError, VersionError, few, shown
from sparcel.products.delta.applying import check_together, check_writable, made_by, prepare_read
from sparcel.products.delta.chunk import NOTHING, Chunk, Version, read_chunk
from sparcel.products.delta.elements import Only, bits_of
from sparcel.products.delta.files import File
from sparcel.products.delta.index import Entry
from sparcel.products.delta.parts import (
    Sliced,
    elements_of,
    memory_of,
    owners,
    parts_of,
    tensors_of,
    untied,
    version_of,
)
from sparcel.products.delta.prepared import Inverse, Prepared, Target
from sparcel.products.delta.slicing import checked_only, chunks_of, prepare_slices, sliced_of
from sparcel.products.stores import DoubtedStore, Ranged, Store, ranged, read_at_most

_SPARE = 1 << 20
"""Bytes of a file beside what follows from the weights."""

_PARAMETRISED = ".parametrizations."
"""How torch names what a parametrisation keeps in the place of a tensor."""


def _read_ahead(
    store: Store, way: Sequence[Entry], ahead: int, most: int
) -> Iterator[tuple[Entry, Callable[[], list[File]]]]:
    """Yield each entry, and what returns its files, which are being read with those after it.

    Up to ``ahead`` entries are read at a time, with no more than ``most`` bytes together. Reads
    that are not asked for any more end by themselves.
    """
    if min(ahead, len(way)) == 1 or not isinstance(store, DoubtedStore):
        yield from ((entry, partial(files_of, store, entry, most, read_at_most)) for entry in way)
        return
    pool, left, size = ThreadPoolExecutor(ahead), deque(way), 0
    reading: deque[tuple[Entry, Future[list[File]]]] = deque()
    try:
        while left or reading:
            while left and len(reading) < ahead and (not size or size + left[0].bytes <= most):
                entry = left.popleft()
                size += entry.bytes
                reading.append((entry, pool.submit(files_of, store, entry, most, read_at_most)))
            entry, files = reading.popleft()
            yield entry, files.result
            size -= entry.bytes
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def files_of(
    store: Store, entry: Entry, most: int, read: Callable[[Store, str, int], memoryview | Ranged]
) -> list[File]:
    """Return the files of a delta or a whole model, read by `read_at_most` or as `ranged`."""
    files, left = [], min(entry.bytes, most)
    for name in entry.names:
        data = read(store, name, left)
        files.append(File(data, name))
        left -= len(data)
    return files


def check_stated(entry: Entry, files: list[File]) -> None:
    """Raise FormatError unless files state the versions that the index lists."""
    for file in files:
        base, version = entry.base and file.version("base"), file.version()
        if (base, version) != (entry.base, entry.version):
            of, instead = (f" of {one}" if one else "" for one in (base, entry.base))
            raise FormatError(
                f"{shown(file.name)} says that it makes version {version}{of}, and the index lists"
                f" {entry.version}{instead}"
            )


def read_whole(files: Sequence[File], version: Version) -> dict[str, Tensor]:
    """Return the tensors of a whole model: stored as such, or by several processes as chunks.

    Raises
    ------
    FormatError
        If they are not the version.
    """
    tensors: dict[str, Tensor] = {}
    if files[0].whole:
        tensors = {name: tensor for file in files for name, tensor in file.tensors().items()}
    else:
        chunks = read_chunks(files, NOTHING, version)
        with _failing_as_file(files):
            prepare_read(tensors, chunks).apply()
    found = version_of(tensors, version.number)
    if found != version:
        raise FormatError(f"{files[0].name} holds {found} instead of {version}")
    return tensors


def read_chunks(files: Sequence[File], base: Version, version: Version) -> list[Chunk]:
    """Return the chunks of a delta.

    Raises
    ------
    FormatError
        If they do not make the version of its base.
    """
    chunks = [read_chunk(chunk) for file in files for chunk in file.chunks()]
    with _failing_as_file(files):
        check_together(chunks)
    found, made = chunks[0].base, made_by(chunks)
    if (found, made) != (base, version):
        raise FormatError(
            f"{files[0].name} makes version {made} of {found}, not {version} of {base}"
        )
    return chunks


@contextmanager
def _failing_as_file(files: Sequence[File]) -> Iterator[None]:
    """Turn VersionError about what files hold into FormatError, so that others are looked for."""
    try:
        yield
    except VersionError as error:
        raise FormatError(f"{', '.join(file.name for file in files[:3])}: {error}") from error


class Whole:
    """A whole model that is read and checked, and waits to be written.

    Parameters
    ----------
    tensors
        Those of the version.
    target
        Where they are written to.
    places
        For each tensor of the version the target's that takes its values, or itself.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], target: Target, places: Mapping[str, Tensor]
    ) -> None:
        check_writable(parts_of(target), target)
        self.waits = True
        self._tensors, self._target, self._there = tensors, target, _memory(target)
        self._places = places
        parts = untied(parts_of(places)).items()
        self._written = {name: part for name, part in parts if places[name] is not tensors[name]}

    def apply(self) -> None:
        """Write it into the target's tensors; a mapping also gets the tensors that it lacks."""
        if _memory(self._target) != self._there:
            raise VersionError("tensors were replaced since this was prepared; prepare again")
        self.waits = False
        for name, part in self._written.items():
            part.bits.copy_(bits_of(self._tensors[name]).view(part.bits.shape))
        if not isinstance(self._target, nn.Module):
            for name in self._there.keys() - self._places.keys():
                del self._target[name]
            self._target.update(self._places)
        if isinstance(self._target, Sliced) and isinstance(self._tensors, Sliced):
            self._target.pieces = self._tensors.pieces


def _memory(target: Target) -> dict[str, object]:
    return {name: memory_of(tensor) for name, tensor in tensors_of(target).items()}


Step: TypeAlias = Prepared | Whole


class Kept:
    """What a subscriber keeps: parameters and errors are those of `Subscriber`.

    Attributes
    ----------
    target
        The weights.
    """

    def __init__(self, weights: Target | None, lenient: bool, only: Only | None) -> None:
        self._weights: Target = {} if weights is None else weights
        self.target = self._weights
        self._given: dict[str, Tensor] = {}
        self._only, self._sum = None if only is None else checked_only(only), 0
        if not isinstance(self.target, nn.Module):
            self.target = tensors_of(self.target)
            self._given = dict(self.target)
            if self._only is not None:
                self.target = Sliced(self.target, self._only)
        elif lenient or only is not None:
            raise InputError(
                "a module must have all tensors; to use partial or only, pass them by name"
            )
        self._is_strict, self._moved = bool(self._given) and not lenient, False
        for name, tensor in tensors_of(self.target).items():
            if isinstance(tensor, DTensor):
                raise InputError(
                    f"{shown(name)} is cut over several processes; keep whole tensors in a"
                    " Subscriber, and assign_ what changes in them"
                )

    def files(
        self, store: Store, way: Sequence[Entry], ahead: int
    ) -> Iterator[tuple[Entry, Callable[[], list[File]]]]:
        """Yield each entry, and what returns its files, of which up to ``ahead`` are read ahead."""
        if self._only is None:
            return _read_ahead(store, way, ahead, self._most_bytes())
        return ((one, partial(files_of, store, one, one.bytes, ranged)) for one in way)

    def _most_bytes(self) -> int:
        """Return how long the files of a step can be: not much longer than what they have to fit.

        Names take up to six bytes a character, and are there more than once.
        """
        if not self._is_strict and not isinstance(self.target, nn.Module):
            return sys.maxsize
        held = tensors_of(self.target).items()
        return _SPARE + sum(2 * one.nbytes + 20 * len(name) + 1000 for name, one in held)

    def read(
        self, entry: Entry, files: list[File], since: Version | None, newest: Version
    ) -> tuple[Entry, Step]:
        """Read and check a delta or a whole model, on the way to the version ``newest``.

        Returns what the entry is to these weights, and a step that waits to be written.
        """
        check_stated(entry, files)
        if self._only is not None:
            return self._slices(entry, files, newest, self._only)
        if entry.base is None:
            return entry, self._whole(entry, files, newest)
        return entry, self._delta(entry, entry.base, files, since, newest)

    def _whole(self, entry: Entry, files: list[File], newest: Version) -> Whole:
        tensors = read_whole(files, entry.version)
        if not self._moved and not isinstance(self._weights, nn.Module):
            self.target = tensors_of(self._weights, tensors.keys())
            self._given = dict(self.target) if self._given else {}
        places = self._places(entry.version, tensors, newest)
        return Whole(tensors, self.target, places)

    def _delta(
        self, entry: Entry, base: Version, files: list[File], since: Version | None, newest: Version
    ) -> Prepared:
        prepared = prepare_read(self.target, read_chunks(files, base, entry.version), since)
        if self._given:
            self._places(entry.version, prepared.tensors, newest)
        return prepared

    def _slices(
        self, entry: Entry, files: list[File], newest: Version, only: Only
    ) -> tuple[Entry, Step]:
        """Read what tells of slices."""
        assert isinstance(self.target, Sliced), "only= was given"
        step: Step
        if entry.base is None:
            tensors = sliced_of(files, only, entry.version)
            entry = replace(entry, elements=elements_of(parts_of(tensors)))
            step = Whole(tensors, self.target, self._places(entry.version, tensors, newest))
        else:
            told = (chunks_of(file, only, entry.base, entry.version) for file in files)
            chunks = list(chain.from_iterable(told))
            with _failing_as_file(files):
                check_together(chunks, some=True)
            step = prepare_slices(self.target, chunks, entry.version)
        return replace(entry, bytes=sum(file.taken for file in files)), step

    def _places(
        self, version: Version, theirs: Mapping[str, Tensor], newest: Version
    ) -> dict[str, Tensor]:
        """Return for each tensor of a version the one of the target that takes its values.

        It is the version's own tensor where the target has none. Tied ones are one tensor. Errors
        also name the version ``newest``, to which the other one is a step.

        Raises
        ------
        VersionError
            If a tensor of a module, or one that was given, would have to be another one. If all
            must be there, also if the version or the target has a tensor that the other one lacks
            under all its names.
        """
        ours = tensors_of(self.target)
        there, here = owners(parts_of(theirs)), owners(parts_of(ours))
        first: dict[str, str] = {}
        taken: set[str] = set()
        for name in sorted(theirs.keys() & ours.keys()):
            free = there[name] not in first and here[name] not in taken
            if free and _kind(theirs[name]) == _kind(ours[name]):
                first[there[name]] = name
                taken.add(here[name])
        places = {}
        for name, tensor in theirs.items():
            at = first.get(there[name])
            if at is None:
                places[name] = tensor
            else:  # its own tensor object, where that has the same memory
                places[name] = ours[name if here.get(name) == here[at] else at]
        kept = {name for name, one in self._given.items() if ours.get(name) is one}
        is_module = isinstance(self.target, nn.Module)
        must = theirs.keys() | ours.keys() if is_module else kept & theirs.keys()
        wrong = {name for name in must if places.get(name) is not ours.get(name)}
        if self._is_strict:
            wrong |= {name for name in theirs if there[name] not in first}
            wrong |= {name for name in ours if here[name] not in taken}
        if wrong:
            on_the_way = "" if newest == version else f", on the way to version {newest},"
            partly = ", or with partial=True, if one side may have fewer tensors"
            raise VersionError(
                f"version {version}{on_the_way} has other tensors than the weights given, or ties"
                f" others: {_difference(wrong, theirs, ours)}; begin with weights that have its"
                f" tensors and ties, or without any{'' if is_module else partly}"
            )
        return places

    def follow(self, inverse: Inverse | None, undone: bool = False) -> None:
        """Note that a delta, which has an inverse, or a whole model was written, or undone."""
        self._moved = True
        if self._only is None:
            return
        if inverse is None:
            self._sum = version_of(tensors_of(self.target)).sum
        else:
            self._sum = (self._sum + (-inverse.sum if undone else inverse.sum)) % (1 << 64)

    def expected(self, version: Version) -> Version:
        """Return the version that `version_of` makes of the weights, if they are this one."""
        return version if self._only is None else replace(version, sum=self._sum)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _difference(
    names: Collection[str], theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]
) -> str:
    """Say which tensors one side lacks, or else how the first one differs."""
    wrong = sorted(names, key=lambda name: (_PARAMETRISED not in name, name))  # they tell the most
    extra = [name for name in wrong if name not in theirs]
    lacking = [name for name in wrong if name not in ours]
    if extra or lacking:
        told = [f"have {_first_of(extra)} that the version lacks"] if extra else []
        told += [f"lack {_first_of(lacking)}"] if lacking else []
        why = ""
        if _PARAMETRISED in (name := wrong[0]):
            there = "version" if name in theirs else "weights"
            why = (
                f", because a parametrisation in the {there} computes a tensor from"
                f" '{shown(name)}'; do remove_parametrizations() there, or register the same ones"
                " on both sides"
            )
        return f"the weights {', and '.join(told)}{why}"
    name = wrong[0]
    if _kind(theirs[name]) != _kind(ours[name]):
        return f"'{shown(name)}' is {_kind(theirs[name])} there, and {_kind(ours[name])} here"
    tied, here = (_tied_to(name, those) or "none" for those in (theirs, ours))
    return f"'{shown(name)}' is tied to {tied} there, and to {here} here"


def _first_of(names: Sequence[str]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{shown(names[0])}'{others}"


def _tied_to(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    owner = owners(parts_of(tensors))
    return few(other for other in owner if owner[other] == owner[name] and other != name)
