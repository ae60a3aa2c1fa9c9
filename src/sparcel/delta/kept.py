"""The weights that a subscriber keeps, and what files make of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparcel.delta.anchor import Whole, check_places, failing_as_file, whole_of
from sparcel.delta.applying import check_together, prepare
from sparcel.delta.chunk import Version, read_chunk
from sparcel.delta.files import File
from sparcel.delta.index import Entry
from sparcel.delta.making import version_of
from sparcel.delta.parts import elements_of, parts_of, tensors_of
from sparcel.delta.prepared import Inverse, Prepared, Target
from sparcel.delta.reading import check_stated, files_of, read_ahead
from sparcel.delta.slices import Only, Sliced, checked_only
from sparcel.delta.slicing import chunks_of, prepare_slices, sliced_of
from sparcel.errors import FormatError, InputError, shown
from sparcel.stores import Store, ranged

_SPARE = 1 << 20
"""Bytes of a file beside what follows from the weights."""

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
            return read_ahead(store, way, ahead, self._most_bytes())
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
        return entry, self._delta(entry, files, since, newest)

    def _whole(self, entry: Entry, files: list[File], newest: Version) -> Whole:
        tensors = whole_of(files)
        found = version_of(tensors, entry.version.number)
        if found != entry.version:
            raise FormatError(f"{entry.names[0]} holds {found} instead of {entry.version}")
        if not self._moved and not isinstance(self._weights, nn.Module):
            self.target = tensors_of(self._weights, tensors.keys())
            self._given = dict(self.target) if self._given else {}
        return Whole(entry.version, tensors, self.target, self._given, self._is_strict, newest)

    def _delta(
        self, entry: Entry, files: list[File], since: Version | None, newest: Version
    ) -> Prepared:
        chunks = [read_chunk(chunk) for file in files for chunk in file.chunks()]
        with failing_as_file(entry.names):
            check_together(chunks)
        base = chunks[0].base
        made = base.after(chunks[0].target, sum(chunk.sum for chunk in chunks))
        if (base, made) != (entry.base, entry.version):
            raise FormatError(
                f"{entry.names[0]} makes version {made} of {base}, not {entry.version} of"
                f" {entry.base}"
            )
        prepared = prepare(self.target, chunks, since)
        if self._given:
            theirs, strict = prepared.tensors, self._is_strict
            check_places(entry.version, theirs, self.target, self._given, strict, newest)
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
            step = Whole(entry.version, tensors, self.target, self._given, self._is_strict, newest)
        else:
            told = (chunks_of(file, only, entry.base, entry.version) for file in files)
            chunks = list(chain.from_iterable(told))
            with failing_as_file(entry.names):
                check_together(chunks, some=True)
            step = prepare_slices(self.target, chunks, entry.version)
        return replace(entry, bytes=sum(file.taken for file in files)), step

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
