"""The processes of a host that serve a version together, from one copy of the weights."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from torch import Tensor

from sparcel.delta.chunk import Version
from sparcel.delta.follower import Follower
from sparcel.delta.index import read_index
from sparcel.delta.mirror import Mirror, Seen
from sparcel.errors import FormatError, InputError, VersionError
from sparcel.stores import Store, store_at

_PAUSE = 2e-3
"""Seconds between two looks at the mirror."""
_PATIENCE = 1800.0
"""How many seconds a process waits for another one to follow."""


class HostSubscriber:
    """A subscriber for processes of a host that go to the same versions, as an engine's workers do.

    They share a mirror. Of those that ask for a version, one follows the store, and the others wait
    for it; if it ends or fails, another one takes its place. None may ask for another version
    before all have read the one before. What another run, or a crash, has left in the mirror is
    replaced: each process reads all weights once, and compares their sum.

    Parameters
    ----------
    store
        Where versions come from: as for `Subscriber`.
    place
        The mirror's folder: as for `Follower`. Processes that go to other versions need another.
    """

    def __init__(
        self, store: Store | str | os.PathLike[str], place: str | os.PathLike[str]
    ) -> None:
        self._store, self._place = store_at(store), place
        self._follower: Follower | None = None
        self._mirror: Mirror | None = None
        self._is_sound = False

    @property
    def version(self) -> Version | None:
        """The version that was read last."""
        return None if self._mirror is None else self._mirror.version

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by name, mapped."""
        return {} if self._mirror is None else self._mirror.tensors

    def updates(self, to: int) -> Iterator[Seen]:
        """Go to the version numbered ``to``, and yield what that is, if this process is not there.

        Errors are those of `go_to`.
        """
        self.go_to(to)
        assert self._mirror is not None, "it is there"
        if seen := self._mirror.update():
            yield seen

    def go_to(self, number: int) -> Version:
        """Let the mirror be the version with a number, and return that.

        Raises
        ------
        VersionError
            As `Subscriber.update`; or if other processes follow, and do not go there in half an
            hour.
        """
        until = time.monotonic() + _PATIENCE
        wanted = read_index(self._store).numbered(number)
        while not (self.is_at(wanted) and self._checked()):
            if time.monotonic() > until:
                raise VersionError(
                    f"{self._place} is at version {self._newest()}, and did not go to {wanted} in"
                    f" {_PATIENCE:g} seconds: all processes that share it must go there"
                )
            if not self._follow(wanted):
                time.sleep(_PAUSE)
            elif not self.is_at(wanted):  # the store has another version of that number by now
                wanted = read_index(self._store).numbered(number)
        return wanted

    def is_at(self, version: Version) -> bool:
        """Tell whether the mirror is a version, as after a load of all that took some time."""
        return self._newest() == version

    def check_at(self, version: Version) -> None:
        """Raise VersionError if the mirror has left a version, of which all was just loaded."""
        if not self.is_at(version):
            raise VersionError(
                f"{self._place} went to another version while version {version} was loaded; serve a"
                " version to all servers that share it before the next one"
            )

    def _follow(self, wanted: Version) -> bool:
        """Go to a version, unless another process is following; return whether this one did."""
        try:
            if self._follower is None:
                self._follower = Follower(self._store, self._place, wait=False)
            else:
                self._follower.reopen(wait=False)
        except BlockingIOError:
            return False
        try:
            if self._follower.version != wanted:
                self._follower.update(wanted.number)
        finally:
            self._follower.close()
        self._is_sound = True
        return True

    def _checked(self) -> bool:
        """Tell whether this process has made the mirror, or read it, and found it sound."""
        if not self._is_sound and self._mirror is not None:
            self._is_sound = self._mirror.is_sound()
        return self._is_sound

    def _newest(self) -> Version | None:
        with suppress(InputError, FormatError):  # nobody has made it yet, or it is torn
            self._mirror = self._mirror or Mirror(self._place)
            return self._mirror.newest()
        return None
