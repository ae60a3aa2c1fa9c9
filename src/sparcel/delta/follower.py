"""The process of a host that keeps a mirror at the versions of a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from sparcel.delta.applying import Prepared
from sparcel.delta.chunk import Version
from sparcel.delta.files import anchor_file
from sparcel.delta.making import version_of
from sparcel.delta.mirror_files import (
    COMING,
    PAGE,
    WEIGHTS,
    Page,
    changes_name,
    changes_of,
    is_passing,
    mapped_tensors,
)
from sparcel.delta.subscriber import AHEAD, Ready, Subscriber
from sparcel.errors import FormatError, VersionError
from sparcel.stores import Folder, Store

_KEPT = 4
"""Versions of which the places of changes are kept, for readers that are behind."""


class Follower:
    """Keeps a mirror at the versions of a store: one process a host, which others read by `Mirror`.

    The weights of the mirror are never between two versions where readers see them: they wait while
    a version is written, and for a new follower if this one dies meanwhile. A follower that starts
    goes on with a mirror that is whole, and else makes it anew. The folder is that of a checkpoint:
    its weights are in ``model.safetensors``, and other files, such as a configuration, may lie
    beside them.

    Parameters
    ----------
    store
        Where versions come from: as for `Subscriber`.
    place
        The mirror's folder, on this host: in memory, as in ``/dev/shm``, or on a disk. It has one
        follower at a time.
    wait
        Whether to wait, for a minute at most, for another follower to end.

    Attributes
    ----------
    version
        What the mirror is, or None.

    Raises
    ------
    InputError
        If another process still follows after a minute.
    BlockingIOError
        If another one follows, and this is not to wait.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        place: str | os.PathLike[str],
        *,
        wait: bool = True,
    ) -> None:
        self.version: Version | None = None
        self._store, self._folder = store, Folder(place)
        self._folder.lasting = False
        self._held = ExitStack()
        self._held.enter_context(self._folder.alone(wait=wait))
        self._subscriber: Subscriber | None = None
        try:
            if PAGE not in self._folder.names():
                self._folder.write(PAGE, [Page.blank()])
            self._page = Page(self._folder.path / PAGE, writes=True)
            self._go_on()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process follow; the mirror stays."""
        self._held.close()

    def update(self, to: int | None = None) -> Version | None:
        """Go to the newest version, or to the one with the number ``to``.

        Returns the version, or None if nothing had to be done. Errors are those of
        `Subscriber.update`.
        """
        before = self.version
        if self._subscriber is None:
            self._begin(to)
        else:
            try:
                for ready in self._subscriber._steps(to, AHEAD):
                    self._write(self._subscriber, ready)
            except VersionError:  # its tensors are others, or no delta leads there
                self._begin(to)
        return self.version if self.version != before else None

    def _go_on(self) -> None:
        """Take the mirror as it is, if it is whole."""
        version, file = self._page.told()
        if self._page.sequence % 2 or not file:
            return
        try:
            tensors = mapped_tensors(self._folder.path / WEIGHTS, writes=True)
        except (FormatError, OSError):
            return
        if version_of(tensors, version.number) == version:
            self._keep(version, tensors)

    def _begin(self, to: int | None) -> None:
        """Make the mirror anew, in another file: readers may still have the old one."""
        self._subscriber = self.version = None
        reader = Subscriber(self._store)
        reader.update(to)
        version = reader.version
        if version is None:
            return
        self._folder.write(COMING, anchor_file(reader.tensors, version))
        weights = self._folder.path / WEIGHTS
        with self._page.writing():
            os.replace(self._folder.path / COMING, weights)
            self._page.tell(version, self._page.told()[1] + 1)
        self._keep(version, mapped_tensors(weights, writes=True))
        for other in filter(is_passing, self._folder.names()):
            self._folder.remove(other)

    def _keep(self, version: Version, tensors: dict[str, Tensor]) -> None:
        self._subscriber = Subscriber(self._store, tensors)
        self._subscriber.version = self.version = version

    def _write(self, subscriber: Subscriber, ready: Ready) -> None:
        """Write a version, and before it where it differs from the one before."""
        base, step = self.version, ready._step
        self._subscriber = None  # until all is written
        if base is not None and isinstance(step, Prepared):
            self._folder.write(changes_name(base, ready.version), _places_file(step))
        with self._page.writing():
            ready.apply()
            self._page.tell(ready.version, self._page.told()[1])
        self._subscriber, self.version = subscriber, ready.version
        reached = {
            name: versions[1].number
            for name in self._folder.names()
            if (versions := changes_of(name))
        }
        for name in sorted(reached, key=reached.__getitem__)[:-_KEPT]:
            self._folder.remove(name)


def _places_file(step: Prepared) -> Iterator[bytes | memoryview]:
    """Yield a file with the numbers of the elements that change in each tensor."""
    found: dict[str, list[Tensor]] = {}
    for name, numbers in step.places():
        found.setdefault(name, []).append(numbers)
    places = {}
    for name, parts in found.items():
        narrow = step.tensors[name].numel() <= 1 << 31
        places[name] = torch.cat(parts).to(torch.int32 if narrow else torch.int64)
    return anchor_file(places, step.version)
