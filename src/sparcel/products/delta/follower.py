"""The processes of a host that keep a mirror at the versions of a store, one at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress

import torch
from torch import Tensor

from sparcel.core._files import shared
from sparcel.errors import FormatError, InputError, VersionError
from sparcel.products.delta.chunk import Version
from sparcel.products.delta.elements import bits_of
from sparcel.products.delta.files import File, anchor_file
from sparcel.products.delta.index import read_index
from sparcel.products.delta.kept import Step, Whole
from sparcel.products.delta.mirror import (
    COMING,
    PAGE,
    WEIGHTS,
    Mirror,
    Page,
    Seen,
    changes_name,
    changes_of,
    is_passing,
    is_version,
)
from sparcel.products.delta.prepared import Prepared
from sparcel.products.delta.subscriber import AHEAD, Ready, Subscriber
from sparcel.products.stores import Folder, Store, store_at

_KEPT = 4
"""Versions of which the places of changes are kept, for readers that are behind."""

_PLACE_BYTES = 4
"""Of most places."""

_PAUSE = 2e-3
"""Seconds between two looks at the mirror."""

_PATIENCE = 1800.0
"""How many seconds a process waits for another one to follow."""


class Follower:
    """Keeps a mirror at the versions of a store: one process a host, which others read by `Mirror`.

    The weights of the mirror are never between two versions where readers see them: they wait while
    a version is written, and for a new follower if this one dies meanwhile. A follower that starts
    goes on with a mirror that is whole, which it checks, and else makes it anew. The folder is that
    of a checkpoint: its weights are in ``model.safetensors``, and other files, such as a
    configuration, may lie beside them.

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
        What the mirror is, as this follower has left it, or None.

    Raises
    ------
    InputError
        If another process still follows after a minute; or if the mirror's folder is the store.
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
        self._store, self._folder = store_at(store), Folder(place)
        own = self._folder.path.resolve()
        if isinstance(self._store, Folder) and self._store.path.resolve() == own:
            raise InputError(f"{self._folder} is a store; keep the mirror in a folder of its own")
        self._folder.lasting = False
        self._held = ExitStack()
        self._page: Page | None = None
        self._subscriber: Subscriber | None = None
        self._file, self._is_closed = 0, True
        self._tensors: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        """Memory that tied tensors also have under their other names."""
        self.reopen(wait=wait)

    def reopen(self, *, wait: bool = True) -> None:
        """Follow again after `close`, with what others have made of the mirror meanwhile.

        Errors are those of the constructor.
        """
        self._held.enter_context(self._folder.alone(wait=wait))
        self._is_closed = False
        try:
            if self._page is None or not self._page.is_there:
                self._page, self._subscriber = self._open(), None
            self._go_on(self._page)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process follow; the mirror stays."""
        self._is_closed = True
        self._held.close()

    def update(self, to: int | None = None) -> Version | None:
        """Go to the newest version, or to the one with the number ``to``.

        Returns the version, or None if nothing had to be done. If this raises, the mirror is the
        version that it was, or one on the way, or is written as a whole by the next update.

        Raises
        ------
        VersionError
            As from `Subscriber.update`.
        InputError
            If this follower is closed.
        """
        if self._page is None or self._is_closed:
            raise InputError("this follower is closed; reopen() it")
        if not self._page.is_there:
            self.close()
            self.reopen()
        before, subscriber = self.version, self._subscriber
        if subscriber is None:
            self._begin(self._page, to)
        else:
            try:
                for ready in subscriber._steps(to, AHEAD):
                    self._write(self._page, subscriber, ready)
            except VersionError:  # its tensors are others, or no delta leads there
                if not self._begin(self._page, to):
                    raise
        return self.version if self.version != before else None

    def _open(self) -> Page:
        """Return the mirror's page, which is made if it is not there, or was torn by a crash."""
        path = self._folder.path / PAGE
        try:
            return Page(path, writes=True)
        except (FileNotFoundError, FormatError):
            self._folder.write(PAGE, [Page.blank()])
            return Page(path, writes=True)

    def _go_on(self, page: Page) -> None:
        """Take the mirror as it is, if it is whole; of another run, its tensors are written to.

        What this process has read once is not read again: a follower that fails leaves a page which
        says that the weights are being written.
        """
        told, file = page.told()
        is_whole = page.sequence % 2 == 0
        if self._subscriber is None or file != self._file:
            self.version = self._subscriber = None
            if not file:
                return
            try:
                weights = self._map(file)
            except (FormatError, OSError):
                return
            is_whole = is_whole and is_version(weights, told)
        if self.version != told or not is_whole:
            self._keep(told if is_whole else None)

    def _begin(self, page: Page, to: int | None) -> bool:
        """Make the mirror anew, in another file: readers may still have the old one.

        Returns False if there are no versions.
        """
        reader = Subscriber(self._store)
        reader.update(to)
        version, file = reader.version, page.told()[1] + 1
        if version is None:
            return False
        self._folder.write(COMING, anchor_file(reader.tensors, version))
        weights = self._folder.path / WEIGHTS
        self._subscriber = self.version = None  # until all is written
        with page.writing():
            os.replace(self._folder.path / COMING, weights)
            page.tell(version, file)
        self._map(file)
        self._keep(version)
        for other in filter(is_passing, self._folder.names()):
            self._folder.remove(other)
        return True

    def _map(self, file: int) -> File:
        """Map the weights, which are in another file by now."""
        weights = File(shared(self._folder.path / WEIGHTS, writes=True), WEIGHTS)
        self._tensors, self._copies, self._file = weights.tensors(), weights.copies(), file
        return weights

    def _keep(self, version: Version | None) -> None:
        self._subscriber = Subscriber(self._store, self._tensors)
        self._subscriber.version = self.version = version

    def _copy(self, step: Step) -> None:
        """Write what changes in tied tensors under their other names, too."""
        copies = [(bits_of(copy), bits_of(self._tensors[n])) for n, copy in self._copies.items()]
        if isinstance(step, Whole):
            for copy, bits in copies:
                copy.copy_(bits)
        elif copies:
            for name, places in step.places():
                now = bits_of(self._tensors[name])
                for copy, bits in copies:
                    if bits.data_ptr() == now.data_ptr():
                        copy.view(-1)[places] = now.view(-1)[places]

    def _write(self, page: Page, subscriber: Subscriber, ready: Ready) -> None:
        """Write a version, and before it where it differs from the one before."""
        self._write_places(ready)
        self._subscriber = None  # until all is written
        with page.writing():
            ready.apply()
            self._copy(ready._step)
            page.tell(ready.version, self._file)
        self._subscriber, self.version = subscriber, ready.version

    def _write_places(self, ready: Ready) -> None:
        """Write where a version changes, if that is short; else readers are told all of it."""
        step = ready._step
        there = {name: told[1] for name in self._folder.names() if (told := changes_of(name))}
        useless = sorted(there, key=lambda name: there[name].number)
        if self.version is not None and isinstance(step, Prepared):
            weights = sum(tensor.nbytes for tensor in step.tensors.values())
            if step.changed * _PLACE_BYTES <= weights // 2:
                with suppress(OSError):  # there is no room for it
                    self._folder.write(changes_name(step.base, step.version), _places_file(step))
                    useless = useless[: -(_KEPT - 1)]
        for name in useless:
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
