"""Where islands meet that come and go, what they read and write there, and their signs of life."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch

from sparcel.core.comm import ConnectedCommunicator, address_of_interface, address_towards
from sparcel.core.comm.torch import TorchCommunicator, TorchRendezvous
from sparcel.errors import CommunicationError, InputError, public_url
from sparcel.products.meeting import PORT, Meeting
from sparcel.products.outer.bucket import BucketRendezvous
from sparcel.products.outer.files import FINAL_ERRORS, BucketStore, Retrying, passing
from sparcel.products.outer.history import Watches, beat_seconds
from sparcel.products.outer.protocol import LONGEST
from sparcel.products.stores import ExclusiveStore
from sparcel.products.stores import Store as Bucket

T = TypeVar("T")

LOOKED_SECONDS, ASKED_SECONDS = 0.5, 2.0
"""How long to wait at most between two looks at a place of our own, and at one that is paid for."""

_PAUSE_SECONDS, _WAITED_SHARE = 0.02, 0.3
"""How long to wait until the next look: at first, and as a share of what was waited before."""

_KEPT = 4
"""So many of an island's last connections may still have keys in the place."""

_ROOT = "run-"
"""What the names of an island's files begin with."""


class Board:
    """Keys with texts, in a store.

    Raises
    ------
    CommunicationError
        When the store fails for so many seconds.
    """

    def __init__(self, store: ExclusiveStore, seconds: float) -> None:
        self._store, self._seconds = Retrying(store, seconds), seconds
        self._now = passing(store)

    def create(self, key: str, text: str) -> str:
        """Create a key unless it is there; return the text that it has."""
        while not self._asked(lambda: self._store.create(_ROOT + key, [text.encode()])):
            if (found := self.read(key)) is not None:  # otherwise it has just been removed
                return found
        return text

    def read(self, key: str) -> str | None:
        """Return a key's text, or None."""
        with suppress(FileNotFoundError):
            return bytes(self._asked(lambda: self._store.read(_ROOT + key))).decode()
        return None

    def signs(self, island: int) -> str:
        """Return what sums up an island's last signs of life; it is empty for none."""
        return self.read(f"beat.{island}") or ""

    def remove(self, keys: Iterable[str]) -> None:
        """Remove keys that are there, if the place can be reached now; nobody needs them."""
        with suppress(OSError):
            for key in keys:
                self._now.remove(_ROOT + key)

    def tell(self, key: str, text: str) -> None:
        """Write a key that decides nothing, if the place can be reached now."""
        with suppress(OSError):
            self._now.write(_ROOT + key, [text.encode()])

    def found(self, prefix: str) -> bool:
        """Tell whether there is a key that begins so, as far as it is known yet."""
        return any(one.startswith(_ROOT + prefix) for one in self._asked(self._store.names))

    def end(self, key: str) -> None:
        """Remove all but a key, and whatever else is in the store."""
        self.create(key, "")
        with suppress(OSError):
            for name in self._now.names():
                if name != _ROOT + key:
                    self._now.remove(name)

    def _asked(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except FileNotFoundError:
            raise
        except FINAL_ERRORS as error:
            raise CommunicationError(
                f"the place where islands meet refuses a request: {error!r}"
            ) from error
        except OSError as error:
            raise CommunicationError(
                f"the place where islands meet has not answered for {self._seconds:g} s: {error!r}"
            ) from error


class Beats:
    """An island's signs of life: a key that changes, and tells how far it is."""

    def __init__(self, board: Board, island: int, patience: float) -> None:
        self._board, self.island = board, island
        self.steps, self.a_step = 0, 0.0
        """How many outer steps it has done, and seconds of an inner one."""
        self._before: tuple[float, int] | None = None
        """When the last outer step took effect, and after how many inner steps."""
        self.stop = threading.Event()
        self._seconds = beat_seconds(patience)
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        number, known = 0, self.island
        while True:
            number, island = number + 1, self.island
            if island != known:  # another has taken its place, and it another number
                self._board.remove([f"beat.{known}"])
                known = island
            told = {"beat": number, "steps": self.steps, "seconds": self.a_step}
            self._board.tell(f"beat.{island}", json.dumps(told))
            if self.stop.wait(self._seconds):
                self._board.remove([f"beat.{island}"])
                return

    def count(self, clock: int) -> None:
        """Take the time of an outer step, which came after so many inner steps."""
        now = time.monotonic()
        if self._before is not None and clock > self._before[1]:
            self.a_step = (now - self._before[0]) / (clock - self._before[1])
        self._before = now, clock

    def forget(self) -> None:
        """Count inner steps anew."""
        self._before = None

    def end(self) -> None:
        """Give none any more."""
        self.stop.set()
        self._thread.join()


class Listener:
    """Tells which islands are silent, as far as their place answers at once."""

    def __init__(self, store: ExclusiveStore, patience: float) -> None:
        self._board, self._watches = Board(store, 0.0), Watches(patience)

    def is_silent(self, island: int) -> bool:
        """Return whether an island has been silent for too long since this was first asked."""
        if self._watches.is_due(island, time.monotonic()):
            try:
                self._watches.hear(island, self._board.signs(island))
            except CommunicationError:  # nobody can give a sign now
                self._watches.clear()
                return False
        return self._watches.is_silent(island)


class Place(NamedTuple):
    """Where islands meet.

    Attributes
    ----------
    board
        What they read and write.
    connect
        What connects the islands of these numbers, given a name of their own, and the place of this
        one among them.
    pause
        Seconds that pass at most between two looks.
    patience
        Seconds for which an island is waited for.
    """

    board: Board
    connect: Callable[[str, list[int], int], ConnectedCommunicator]
    pause: float
    patience: float


def pause_after(waited: float, most: float) -> float:
    """Return the seconds until the next look at a place, after so many of waiting."""
    return min(max(_PAUSE_SECONDS, _WAITED_SHARE * waited), most)


def meeting_at(place: object, patience: float) -> Place | None:
    """Return where islands meet, or None for a group.

    Raises
    ------
    InputError
        When the place is none.
    CommunicationError
        When nobody answers there.
    """
    if isinstance(place, str) and place.startswith("tcp://"):
        return _over_links(place, patience)
    if isinstance(place, str | os.PathLike | Bucket):
        return _by_files(place, patience)
    return None


def _over_links(place: str, patience: float) -> Place:
    try:
        found = urlsplit(place)
        host, port = found.hostname, found.port or PORT
    except ValueError:
        host = None
    if not host:
        raise InputError(f'{public_url(place)!r} is no place to meet; give "tcp://HOST:PORT"')
    meeting = Meeting(host, port, found.path.strip("/") or "run", patience)
    try:
        Retrying(meeting, patience).names()  # it may be about to restart
        address = address_of_interface() or address_towards(host)
    except OSError as error:
        raise CommunicationError(
            f"nobody serves islands at {public_url(place)} ({error}); run `sparcel meet --port"
            f" {port}` there"
        ) from error
    kept, former = BucketStore(meeting, patience), deque[str]()

    def connect(name: str, members: list[int], rank: int) -> ConnectedCommunicator:
        if rank == 0:
            former.append(name)
            if len(former) > _KEPT:
                kept.under(former.popleft()).clear()
        store, on_host = kept.under(name), torch.device("cpu")
        return TorchCommunicator(
            TorchRendezvous(store, members, rank, patience, "gloo", on_host, address)
        )

    return Place(Board(meeting, LONGEST * patience), connect, LOOKED_SECONDS, patience)


def _by_files(place: Bucket | str | os.PathLike[str], patience: float) -> Place:
    kept = BucketStore(place, patience)

    def connect(name: str, members: list[int], rank: int) -> ConnectedCommunicator:
        listener = Listener(kept.found, patience)
        return ConnectedCommunicator(
            BucketRendezvous(kept.under(name), members, rank, patience, listener.is_silent)
        )

    return Place(Board(kept.found, LONGEST * patience), connect, ASKED_SECONDS, patience)
