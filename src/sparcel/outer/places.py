"""Where islands meet that come and go: a place that a command serves, or a bucket."""

from __future__ import annotations

import os
from collections import deque
from urllib.parse import urlsplit

import torch

from sparcel.comm import ConnectedCommunicator, address_of_interface, address_towards
from sparcel.comm.torch import TorchCommunicator, TorchRendezvous
from sparcel.errors import CommunicationError, InputError, public_url
from sparcel.meeting import PORT, Meeting
from sparcel.outer.beats import Listener
from sparcel.outer.board import Board, Patient
from sparcel.outer.bucket import BucketRendezvous
from sparcel.outer.files import BucketStore
from sparcel.outer.islands import Place
from sparcel.outer.protocol import LONGEST
from sparcel.stores import Store as Bucket

LOOKED_SECONDS, ASKED_SECONDS = 0.5, 2.0
"""How long to wait at most between two looks at a place of our own, and at one that is paid for."""

_KEPT = 4
"""So many of an island's last connections may still have keys in the place."""


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
        Patient(meeting, patience).names()  # it may be about to restart
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

    return Place(Board(meeting, LONGEST * patience), connect, LOOKED_SECONDS)


def _by_files(place: Bucket | str | os.PathLike[str], patience: float) -> Place:
    kept = BucketStore(place, patience)

    def connect(name: str, members: list[int], rank: int) -> ConnectedCommunicator:
        listener = Listener(kept.found, patience)
        return ConnectedCommunicator(
            BucketRendezvous(kept.under(name), members, rank, patience, listener.is_silent)
        )

    return Place(Board(kept.found, LONGEST * patience), connect, ASKED_SECONDS)
