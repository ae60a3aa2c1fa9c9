"""What a subscriber has done since it told of a version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparcel.delta.change import Change
from sparcel.delta.chunk import Version
from sparcel.delta.index import Entry
from sparcel.delta.prepared import Done, Inverse, changes_of, whole_changes
from sparcel.errors import VersionError

if TYPE_CHECKING:
    from sparcel.delta.subscriber import Subscriber


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
class Untold:
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
