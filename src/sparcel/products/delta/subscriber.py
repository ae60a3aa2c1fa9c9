"""The side that serves: versions come from a store."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from sparcel.core._checks import checked_flag
from sparcel.errors import FormatError, InputError, VersionError
from sparcel.products.delta.chunk import Version
from sparcel.products.delta.decoding import Change
from sparcel.products.delta.elements import Only
from sparcel.products.delta.index import Entry, read_index
from sparcel.products.delta.kept import Kept, Step
from sparcel.products.delta.parts import tensors_of, version_of
from sparcel.products.delta.prepared import Done, Inverse, Target, changes_of, whole_changes
from sparcel.products.stores import Store, store_at

AHEAD = 8
"""Deltas that are read at the same time, for a reader that is behind."""

_TRIES = 3
"""How often a missing file is looked up anew in the index, before it is avoided."""


@dataclass(frozen=True)
class Update:
    """A version that a subscriber has reached, and what it took since it told of one before.

    Attributes
    ----------
    base
        The version that it has told before, or None if a whole model was read since.
    version
        The version now.
    bytes
        Length of all files that were read.
    changed
        How many elements each step has changed, added up; all of them after a whole model.
    """

    base: Version | None
    version: Version
    bytes: int
    changed: int
    _subscriber: Subscriber = field(repr=False)
    _steps: list[Done] | None = field(repr=False)
    _moves: int = field(repr=False)

    def changes(self) -> Iterator[Change]:
        """Yield all that has changed since ``base``, with the new values.

        An element that changed in several versions may come several times, with the same value. If
        ``base`` is None, all tensors come whole, and others that there may have been are gone.

        Raises
        ------
        VersionError
            If the subscriber has gone on since, so that its weights have other values. The iterator
            raises it, too, if that happens before its end.
        """
        self._check_current()
        now = self._subscriber.tensors
        told = whole_changes(now, now) if self._steps is None else changes_of(self._steps, now)
        return self._while_current(told)

    def _while_current(self, changes: Iterator[Change]) -> Iterator[Change]:
        self._check_current()
        for change in changes:
            yield change
            self._check_current()

    def _check_current(self) -> None:
        if self._moves != self._subscriber._moves:
            raise VersionError(
                f"the subscriber has left version {self.version}, whose values cannot be told any"
                " more; take the changes of an update before the next one"
            )


@dataclass
class _Untold:
    """What a subscriber has done since it told of a version.

    Attributes
    ----------
    base
        The version of which it told, or None if a whole model was read since.
    steps
        Deltas that were written and undone since then.
    """

    base: Version | None = None
    bytes: int = 0
    changed: int = 0
    steps: list[Done] = field(default_factory=list)
    is_new: bool = False
    """Whether a version was read, and none was only undone."""

    def add(self, entry: Entry, inverse: Inverse | None) -> None:
        """Note a step: a delta, which has an inverse, or a whole model."""
        if inverse is None:
            self.base, self.steps, self.changed = None, [], entry.elements
        elif self.base is not None:
            self.steps.append(inverse.done())
            self.changed += inverse.changed
        self.bytes += entry.bytes
        self.is_new = True


@dataclass(frozen=True)
class Ready:
    """A step to another version that is read and checked, and waits to be written."""

    _subscriber: Subscriber = field(repr=False)
    _since: Version | None
    _entry: Entry = field(repr=False)
    _step: Step = field(repr=False)

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
        self._subscriber._apply(self)
        return self._subscriber._tell()


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
        the subscriber keeps its own, in memory, as in an empty mapping. Tensors that are given are
        written in place: a version that has other ones, by name, dtype, shape or tie, is refused.
        What wrappers put into names does not count, as for `Publisher.publish`. A module has its
        tensors as parameters and buffers, and not as copies that a hook of its state dict makes.
    partial
        Whether a mapping may have names that a version lacks, which are then taken out of it, and
        may lack others, which are then added. Without it, a mistake in names would let a server go
        on with stale weights.
    only
        For a server of a part of the model: what it has of each tensor, by name. That is ``...``
        for all of it, a slice of its rows, or a tuple of slices: ``{"norm.weight": ...,
        "up.weight": slice(0, 512)}``. No more is kept, and little more is read if the publisher's
        chunks are ``apart``. Tensors that are given have these shapes. Of a chunk that tells of
        more than the server has, the places must not depend on old weights, which those of the
        codes ``steps`` (but of packed values) and ``values`` do not; and its sum is not checked.

    Attributes
    ----------
    version
        What the weights are; None before the first update, and after one that could not be undone.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        tensors: Target | None = None,
        *,
        partial: bool = False,
        only: Only | None = None,
    ) -> None:
        self.version: Version | None = None
        self._store = store_at(store)
        self._kept = Kept(tensors, checked_flag(partial, "partial"), only)
        self._inverse: Inverse | None = None
        self._untold, self._moves = _Untold(), 0

    @property
    def tensors(self) -> MutableMapping[str, Tensor]:
        """The weights by name."""
        return tensors_of(self._kept.target)

    def update(self, to: int | None = None) -> Update | None:
        """Go to the version that is the newest when this begins, or to the one numbered ``to``.

        Returns
        -------
        Update or None
            The version that is now served, and what it took to get there from the one that was
            told before, over all versions in between. None if nothing had to be done.

        Raises
        ------
        VersionError
            If nothing in the store leads there, or its index has vanished; the weights are then a
            whole version, maybe one on the way, which may be older than the one before.
        """
        for ready in self._steps(to, AHEAD):
            self._apply(ready)
        return self._tell() if self._untold.is_new else None

    def updates(self, to: int | None = None) -> Iterator[Update]:
        """Go there step by step, a whole model or a delta at a time, and yield each step."""
        for ready in self._steps(to, AHEAD):
            yield ready.apply()

    def prepare(self, to: int | None = None) -> Ready | None:
        """Read and check the next step, while the weights serve; None if nothing has to be done.

        A server pauses only for `Ready.apply`, which writes what changes. Errors are those of
        `update`.
        """
        return next(self._steps(to, 1), None)

    def _steps(self, to: int | None, ahead: int) -> Iterator[Ready]:
        """Prepare step after step, each of which is to be taken, past files that are lost or torn.

        Files are read as many at a time as ``ahead``, and the index once, unless one fails.
        """
        passed_by: set[str] = set()
        missed, why = 0, None
        while way := self._way(to, passed_by, why):
            for entry, files in self._kept.files(self._store, way, ahead):
                try:
                    read = self._kept.read(entry, files(), self.version, way[-1].version)
                except FileNotFoundError:  # it was pruned after the index was read, or is lost
                    missed += 1
                    if missed >= _TRIES:
                        passed_by.update(entry.names)
                    break
                except FormatError as error:
                    passed_by.update(entry.names)
                    why = error
                    break
                yield Ready(self, self.version, *read)
                if self.version != entry.version:
                    break
            else:
                return

    def _way(self, to: int | None, without: set[str], why: FormatError | None) -> list[Entry]:
        """Return the way to a version; if there is none, also say why a file was passed by."""
        index = read_index(self._store)
        if self.version is not None and index.newest is None:
            raise VersionError(
                f"the weights are version {self.version}, but {self._store} has no versions any"
                " more: its index has vanished; bring it back, or publish anew and reload()"
            )
        try:
            return index.way(self.version, to, without)
        except VersionError as error:
            if why is not None:
                error.add_note(str(why))
            raise

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
        self._kept.follow(inverse, undone=True)
        self._untold.steps.append(inverse.done())
        return inverse.base

    def verify(self) -> None:
        """Read all weights, and raise VersionError if they are not what their version says."""
        if self.version is None:
            raise InputError("there is no version yet; update first")
        found = version_of(self.tensors, self.version.number)
        expected = self._kept.expected(self.version)
        if found != expected:
            raise VersionError(
                f"the weights are {found} instead of version {expected}: something else has"
                " written to them; reload() begins anew"
            )

    def _apply(self, ready: Ready) -> None:
        if self.version != ready._since or not ready._step.waits:
            raise VersionError(
                f"version {ready.version} was prepared for {ready._since}, but the weights are"
                f" {self.version} by now, or it is written already; prepare again"
            )
        with self._writing(ready._step):
            inverse = ready._step.apply()
        self.version, self._inverse = ready.version, inverse
        self._kept.follow(inverse)
        self._untold.add(ready._entry, inverse)

    def _tell(self) -> Update:
        """Return what was done since the last time, also before an error that interrupted it."""
        done, version = self._untold, self.version
        assert version is not None, "a step was written"
        self._untold = _Untold(version)
        steps = None if done.base is None else done.steps
        return Update(done.base, version, done.bytes, done.changed, self, steps, self._moves)

    @contextmanager
    def _writing(self, step: Step | Inverse) -> Iterator[None]:
        """Set no version while a step is written, and the last one again if nothing was written."""
        before = self.version, self._inverse
        self.version = self._inverse = None
        self._moves += 1
        try:
            yield
        except BaseException:
            if step.waits:
                self.version, self._inverse = before
            raise
