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
from sparcel.errors import InputError, VersionError
from sparcel.stores import Store

_PAUSE = 2e-3
"""Seconds between two looks at the mirror."""
_PATIENCE = 1800.0
"""How many seconds a process waits for another one to follow."""


class HostSubscriber:
    """A subscriber for processes of a host that go to the same versions, as an engine's workers do.

    They share a mirror. The first one that asks for a version follows the store, and the others
    wait for it; if it ends or fails, another one takes its place. None may ask for another version
    before all have read the one before. What another run has left in the mirror is replaced.

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
        self._store, self._place = store, place
        self._follower: Follower | None = None
        self._mirror: Mirror | None = None

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
            As `Subscriber.update`; or if another process follows, and does not go there in half an
            hour.
        """
        until = time.monotonic() + _PATIENCE
        wanted = read_index(self._store).numbered(number)
        while not self.is_at(wanted):
            if self._follower is None:
                with suppress(BlockingIOError):
                    self._follower = Follower(self._store, self._place, wait=False)
            if self._follower is None:
                if time.monotonic() > until:
                    raise VersionError(
                        f"{self._place} is at version {self._newest()}, and did not go to {wanted}"
                        f" in {_PATIENCE:g} seconds: all processes that share it must go there"
                    )
                time.sleep(_PAUSE)
                continue
            try:
                self._follower.update(number)
            except BaseException:
                self.close()
                raise
        return wanted

    def is_at(self, version: Version) -> bool:
        """Tell whether the mirror is a version, as after a load of all that took some time."""
        return self._newest() == version

    def close(self) -> None:
        """Let another process follow."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def _newest(self) -> Version | None:
        with suppress(InputError):  # nobody has made it yet
            self._mirror = self._mirror or Mirror(self._place)
        return None if self._mirror is None else self._mirror.newest()
