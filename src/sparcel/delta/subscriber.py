"""The side that serves: versions come from a store."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparcel.delta.anchor import Whole, check_places, failing_as_file, whole_of
from sparcel.delta.applying import Inverse, Prepared, Target, check_together, prepare
from sparcel.delta.chunk import Version, read_chunk
from sparcel.delta.decoding import Change
from sparcel.delta.encoding import version_of
from sparcel.delta.files import File
from sparcel.delta.index import Entry, Index, read_index
from sparcel.delta.parts import tensors_of
from sparcel.delta.stores import Store, store_at
from sparcel.errors import FormatError, InputError, VersionError

_TRIES = 3
"""How often a missing file is looked up anew in the index, before it is avoided."""


@dataclass(frozen=True)
class Ready:
    """A step to another version that is read and checked, and waits to be written."""

    _entry: Entry = field(repr=False)
    _subscriber: Subscriber = field(repr=False)
    _since: Version | None
    _step: Prepared | Whole = field(repr=False)

    @property
    def version(self) -> Version:
        """The version that it makes."""
        return self._entry.version

    def apply(self) -> Update:
        """Write it, and return what it was.

        Raises
        ------
        VersionError
            If it is written already, if the subscriber has gone to another version meanwhile, or if
            tensors that change were replaced.
        """
        return self._subscriber._apply(self._entry, self._since, self._step)


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
        Where versions come from: a store, or a path or URL as for `store_at`.
    tensors
        A module or tensors by name that are kept at the newest version, on any device. By default
        the subscriber keeps its own, in memory. Tensors that are given are written in place: a
        version in which one of them has another dtype, shape or tie is refused. Names that they
        lack are added to a mapping, and a module must have them all, as parameters and buffers and
        not as copies that a hook of its state dict makes.

    Attributes
    ----------
    version
        What the weights are; None before the first update, and after one that could not be undone.
    """

    def __init__(
        self, store: Store | str | os.PathLike[str], tensors: Target | None = None
    ) -> None:
        self.version: Version | None = None
        self._store = store_at(store)
        self._target: Target = {} if tensors is None else tensors
        self._given = {} if isinstance(self._target, nn.Module) else dict(self._target)
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
        return tensors_of(self._target)

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
            If nothing in the store leads there, or its index has vanished; the weights are then a
            whole version, maybe one on the way, which may be older than the one before.
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
        while way := self._index().way(self.version, to, passed_by):
            try:
                return self._read(way[0])
            except FileNotFoundError:  # it was pruned after the index was read, or is lost
                missed += 1
                if missed >= _TRIES:
                    passed_by.update(way[0].names)
            except FormatError:
                passed_by.update(way[0].names)
        return None

    def _index(self) -> Index:
        index = read_index(self._store)
        if self.version is not None and index.newest is None:
            raise VersionError(
                f"the weights are version {self.version}, but {self._store} has no versions any"
                " more: its index has vanished; bring it back, or publish anew and reload()"
            )
        return index

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
        inverse = self._inverse
        with self._writing(inverse):
            inverse.undo()
        self.version = inverse.base
        return inverse.base

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
            tensors = whole_of(files)
            found = version_of(tensors, entry.version.number)
            if found != entry.version:
                raise FormatError(f"{entry.names[0]} holds {found} instead of {entry.version}")
            whole = Whole(entry.version, tensors, self._target, self._given)
            return Ready(entry, self, self.version, whole)
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
        prepared = prepare(self._target, chunks, self.version)
        if self._given:
            check_places(entry.version, prepared.tensors, self._target, self._given)
        return Ready(entry, self, self.version, prepared)

    def _apply(self, entry: Entry, since: Version | None, step: Prepared | Whole) -> Update:
        if self.version != since or not step.waits:
            raise VersionError(
                f"version {entry.version} was prepared for {since}, but the weights are"
                f" {self.version} by now, or it is written already; prepare again"
            )
        with self._writing(step):
            inverse = step.apply()
        self.version, self._inverse = entry.version, inverse
        base = since if inverse else None
        return Update(base, entry.version, entry.bytes, entry.changed, self.tensors, inverse)

    @contextmanager
    def _writing(self, step: Prepared | Inverse | Whole) -> Iterator[None]:
        """Set no version while a step is written, and the last one again if nothing was written."""
        before = self.version, self._inverse
        self.version = self._inverse = None
        try:
            yield
        except BaseException:
            if step.waits:
                self.version, self._inverse = before
            raise
