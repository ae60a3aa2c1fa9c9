"""The side that serves: versions come from a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparcel.delta.applying import Inverse, apply_, prepare
from sparcel.delta.bits import bits_of
from sparcel.delta.chunk import Version
from sparcel.delta.decoding import Change
from sparcel.delta.encoding import version_of
from sparcel.delta.files import File
from sparcel.delta.index import Entry, read_index
from sparcel.delta.parts import owners, parts_of
from sparcel.delta.stores import Store
from sparcel.errors import FormatError, InputError, VersionError

_TRIES = 3
"""How often a way is looked for, while a publisher removes what was on it."""


_Write: TypeAlias = Callable[[], Inverse | None]


@dataclass(frozen=True)
class Ready:
    """A step to another version that is read and checked, and waits to be written."""

    _entry: Entry = field(repr=False)
    _subscriber: Subscriber = field(repr=False)
    _since: Version | None
    _write: _Write = field(repr=False)

    @property
    def version(self) -> Version:
        """The version that it makes."""
        return self._entry.version

    def apply(self) -> Update:
        """Write it, and return what it was.

        Raises
        ------
        VersionError
            If the subscriber has gone to another version meanwhile.
        """
        return self._subscriber._apply(self._entry, self._since, self._write)


@dataclass(frozen=True)
class Update:
    """A version that a subscriber has reached.

    Attributes
    ----------
    base
        The version before, or None after a whole model.
    version
        The version now.
    bytes
        Length of the files that were read.
    changed
        How many elements have changed; all of them after a whole model.
    """

    base: Version | None
    version: Version
    bytes: int
    changed: int
    _tensors: MutableMapping[str, Tensor] = field(repr=False)
    _inverse: Inverse | None = field(repr=False, default=None)

    def changes(self) -> Iterator[Change]:
        """Yield what has changed, with the new values; only until the subscriber goes on."""
        if self._inverse is not None:
            yield from self._inverse.changes()
            return
        for name, tensor in self._tensors.items():
            yield Change.whole(name, tensor)


class Subscriber:
    """Keeps weights at the newest version of a store, in place, and never between two versions.

    It begins with a whole model, and goes on with deltas, by the files that lead to the version
    wanted with the fewest bytes. What does not check leaves the weights as they were; a file that
    is torn is passed by, if others lead there.

    Parameters
    ----------
    store
        Where versions come from: see `store_at`.
    tensors
        A module or tensors by name that are kept at the newest version, on any device. By default
        the subscriber keeps its own, in memory.

    Attributes
    ----------
    version
        What the weights are, or None before the first update.
    """

    def __init__(
        self, store: Store, tensors: nn.Module | MutableMapping[str, Tensor] | None = None
    ) -> None:
        self.version: Version | None = None
        self._store = store
        self._target: nn.Module | MutableMapping[str, Tensor] = {} if tensors is None else tensors
        self._inverse: Inverse | None = None
        for name, tensor in self.tensors.items():
            if isinstance(tensor, DTensor):
                raise InputError(
                    f"{name} is cut over several processes; keep whole tensors in a Subscriber, and"
                    " assign_ what changes in them"
                )

    @property
    def tensors(self) -> MutableMapping[str, Tensor]:
        """The weights by name."""
        if isinstance(self._target, nn.Module):
            state: MutableMapping[str, Tensor] = self._target.state_dict()
            return state
        return self._target

    def update(self, to: int | None = None) -> Update | None:
        """Go to the newest version, or to the one with the number ``to``.

        Returns
        -------
        Update or None
            The version that is now served, and what it took to get there from the one before; its
            `changes` are those of the last step. None if nothing had to be done.

        Raises
        ------
        VersionError
            If nothing in the store leads there; the weights are then a whole version, maybe one on
            the way, which may be older than the one before.
        """
        steps = deque(self.updates(to), maxlen=1)
        return steps[0] if steps else None

    def updates(self, to: int | None = None) -> Iterator[Update]:
        """Go there step by step, a whole model or a delta at a time, and yield each step."""
        passed_by: set[str] = set()
        while ready := self._prepared(to, passed_by):
            yield ready.apply()

    def prepare(self, to: int | None = None) -> Ready | None:
        """Read and check the next step, while the weights serve; None if nothing has to be done.

        A server pauses only for `Ready.apply`, which writes what changes. Errors are those of
        `update`.
        """
        return self._prepared(to, set())

    def _prepared(self, to: int | None, passed_by: set[str]) -> Ready | None:
        """Prepare the next step, past files that are lost or torn, which are noted."""
        missed = 0
        while way := read_index(self._store).way(self.version, to, passed_by):
            try:
                return self._read(way[0])
            except FileNotFoundError:  # it was pruned after the index was read, or is lost
                missed += 1
                if missed >= _TRIES:
                    passed_by.update(way[0].names)
            except FormatError:
                passed_by.update(way[0].names)
        return None

    def reload(self) -> Update | None:
        """Begin anew with a whole model, whatever the weights are now."""
        self.version = self._inverse = None
        return self.update()

    def rollback(self) -> Version:
        """Undo the last delta, bit for bit, and return the version that the weights are again.

        Raises
        ------
        VersionError
            If the last step was a whole model, or is undone already.
        """
        if self._inverse is None:
            raise VersionError("there is no delta to undo: only the last one can be")
        self._inverse.undo()
        self.version = self._inverse.base
        self._inverse = None
        return self.version

    def verify(self) -> None:
        """Read all weights, and raise VersionError if they are not what their version says."""
        if self.version is None:
            raise InputError("there is no version yet; update first")
        found = version_of(self.tensors, self.version.number)
        if found != self.version:
            raise VersionError(
                f"the weights are {found} instead of version {self.version}: something else has"
                " written to them; reload() begins anew"
            )

    def _read(self, entry: Entry) -> Ready:
        """Read and check a delta or a whole model."""
        files = [File(self._store.read(name), name) for name in entry.names]
        for file, name in zip(files, entry.names, strict=True):
            base = entry.base and file.version("base")
            if (base, file.version()) != (entry.base, entry.version):
                raise FormatError(f"{name} holds {file.version()}, not {entry.version}")
        if entry.kind == "anchor":
            whole = whole_of(files)
            found = version_of(whole, entry.version.number)
            if found != entry.version:
                raise FormatError(f"{entry.names[0]} holds {found} instead of {entry.version}")
            return Ready(entry, self, self.version, partial(self._write_whole, entry, whole))
        chunks = [chunk for file in files for chunk in file.chunks()]
        prepared = prepare(self._target, chunks, self.version)
        if prepared.version != entry.version:
            raise FormatError(
                f"{entry.names[0]} makes version {prepared.version} instead of {entry.version}"
            )
        return Ready(entry, self, self.version, prepared.apply)

    def _apply(self, entry: Entry, since: Version | None, write: _Write) -> Update:
        if self.version != since:
            raise VersionError(
                f"version {entry.version} was prepared for {since}, but the weights are"
                f" {self.version} by now; prepare again"
            )
        self._inverse = write()
        base, self.version = self.version, entry.version
        return Update(
            base if self._inverse else None,
            entry.version,
            entry.bytes,
            entry.changed,
            self.tensors,
            self._inverse,
        )

    def _write_whole(self, entry: Entry, whole: dict[str, Tensor]) -> None:
        """Write a whole model to the weights, or keep it as these."""
        tensors = self.tensors
        different = _different(whole, tensors)
        if different and isinstance(self._target, nn.Module):
            raise VersionError(
                f"version {entry.version} has other tensors than the module, or ties others:"
                f" {sorted(different)[:3]}"
            )
        self.version = self._inverse = None  # until all is written
        for name in different:
            tensors.pop(name, None)
        tensors.update((name, tensor) for name, tensor in whole.items() if name in different)
        with torch.no_grad():
            for name in whole.keys() - different:
                bits_of(tensors[name]).copy_(bits_of(whole[name]))


def whole_of(files: list[File]) -> dict[str, Tensor]:
    """Return the tensors of a whole model: stored as such, or by several processes as chunks."""
    if files[0].whole:
        return {name: tensor for file in files for name, tensor in file.tensors().items()}
    whole: dict[str, Tensor] = {}
    apply_(whole, [chunk for file in files for chunk in file.chunks()])
    return whole


def _different(whole: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of tensors whose dtype or shape differs, or which are tied to others."""
    theirs, ours = _tied(whole), _tied(tensors)
    return {
        name
        for name in whole.keys() | tensors.keys()
        if theirs.get(name) != ours.get(name)
        or _shape(whole.get(name)) != _shape(tensors.get(name))
    }


def _tied(tensors: Mapping[str, Tensor]) -> dict[str, set[str]]:
    """Return for each tensor the names of all that have its memory."""
    names = owners(parts_of(tensors))
    groups: dict[str, set[str]] = {}
    for name, owner in names.items():
        groups.setdefault(owner, set()).add(name)
    return {name: groups[owner] for name, owner in names.items()}


def _shape(tensor: Tensor | None) -> tuple[object, ...]:
    return () if tensor is None else (tensor.dtype, *tensor.shape)
