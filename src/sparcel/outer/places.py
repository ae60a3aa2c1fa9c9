"""Where islands meet that come and go: a store that a command serves, or a bucket."""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import urlsplit

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub leaves it out
from torch.distributed.distributed_c10d import PrefixStore, Store

from sparcel.comm import ConnectedCommunicator, TorchCommunicator
from sparcel.comm.torch import TorchRendezvous
from sparcel.delta.stores import Store as Bucket
from sparcel.errors import CommunicationError, InputError, public_url
from sparcel.outer.bucket import BucketRendezvous, BucketStore
from sparcel.outer.islands import Connect

PORT = 29400
"""Where ``sparcel meet`` listens unless it is told."""

_ON_HOST = torch.device("cpu")


def serve(port: int) -> TCPStore:
    """Serve the place ``tcp://HOST:port`` as long as the result is held; port 0 is any.

    Raises
    ------
    CommunicationError
        When the port is taken.
    """
    try:
        return TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise CommunicationError(f"port {port} cannot be served: {error}") from error


def meeting_at(place: object, patience: float) -> tuple[Store, Connect] | None:
    """Return the store of a place where islands meet, and what connects them; None for a group.

    Raises
    ------
    InputError
        When the place is none.
    CommunicationError
        When no store answers there.
    """
    if isinstance(place, str) and place.startswith("tcp://"):
        return _over_links(place, patience)
    if isinstance(place, str | os.PathLike | Bucket):
        return _by_files(place)
    return None


def _over_links(place: str, patience: float) -> tuple[Store, Connect]:
    try:
        found = urlsplit(place)
        host, port = found.hostname, found.port or PORT
    except ValueError:
        host = None
    if not host:
        raise InputError(f'{public_url(place)!r} is no place to meet; give "tcp://HOST:PORT"')

    def client() -> Store:
        try:
            store = TCPStore(
                host, port, timeout=timedelta(seconds=patience), wait_for_workers=False
            )
        except RuntimeError as error:
            raise CommunicationError(
                f"nobody serves islands at {public_url(place)} ({error}); run `sparcel meet --port"
                f" {port}` there, and leave it running"
            ) from error
        return PrefixStore(f"sparcel{found.path}", store)

    def connect(name: str, members: list[int], rank: int, seconds: float) -> ConnectedCommunicator:
        # A client of its own, because one that waits for a key answers nobody else.
        store = PrefixStore(name, client())
        return TorchCommunicator(TorchRendezvous(store, members, rank, seconds, "gloo", _ON_HOST))

    return client(), connect


def _by_files(place: Bucket | str | os.PathLike[str]) -> tuple[Store, Connect]:
    kept = BucketStore(place)  # torch keeps no store that is written in Python

    def connect(name: str, members: list[int], rank: int, seconds: float) -> ConnectedCommunicator:
        store = PrefixStore(name, kept)
        return ConnectedCommunicator(BucketRendezvous(store, members, rank, seconds))

    return kept, connect
