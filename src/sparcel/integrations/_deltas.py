"""What engines of deltas share: the way of weights to them, and what ranks and servers are told."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.errors import CommunicationError, InputError, VersionError, public_url, shown
from sparcel.products.delta import (
    HostSubscriber,
    Seen,
    ShardedPublisher,
    Store,
    Subscriber,
    Update,
    Version,
    read_index,
    store_at,
)
from sparcel.products.delta.index import index_in

_SECONDS = 0.2
"""How long rollout workers wait before they look into the store again."""


class Passage:
    """The way of weights from the ranks of a trainer to rollout workers, by a store.

    A process is of the trainer, and publishes, or is a worker, and reads.

    Parameters
    ----------
    store
        A path or URL, as for `sparcel.delta.store_at`, valid on all hosts.
    dtype
        The name of the dtype that wider floats become before they are compared; None keeps all.
    mirror
        A folder in which the workers of a host keep one copy; None: each keeps its own.
    publisher
        As for `sparcel.delta.ShardedPublisher`.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        dtype: str | None,
        mirror: str | os.PathLike[str] | None,
        publisher: Mapping[str, Any],
    ) -> None:
        self.store: Store = store_at(store)
        self._dtype = checked_dtype(dtype)
        self._mirror, self._arguments = mirror, publisher
        self._publisher: ShardedPublisher | None = None
        self._reader: HostSubscriber | Subscriber | None = None

    def next_number(self) -> int:
        """Return the number of the version to come."""
        newest = index_in(self.store).newest
        return 0 if newest is None else newest.number + 1

    def publish(self, weights: Iterable[tuple[str, Tensor]], number: int) -> Version:
        """Publish weights, which all ranks of the trainer see whole and in the same order.

        Raises
        ------
        VersionError
            If that was not the version with this number; or as `ShardedPublisher.publish_gathered`.
        """
        if self._publisher is None:
            self._publisher = ShardedPublisher(self.store, **self._arguments)
        version = self._publisher.publish_gathered(narrowed(weights, self._dtype))
        if version.number != number:
            raise VersionError(
                f"version {version.number} was published, and rollout workers wait for {number}:"
                f" another trainer has published to {self.store}; give each one its own"
            )
        return version

    async def updates(self, number: int) -> Iterator[Seen | Update]:
        """Wait for a version, and return what goes there step by step."""
        if self._reader is None:
            place = self._mirror
            self._reader = HostSubscriber(self.store, place) if place else Subscriber(self.store)
        while (newest := read_index(self.store).newest) is None or newest.number < number:
            await asyncio.sleep(_SECONDS)
        return self._reader.updates(number)

    @property
    def version(self) -> Version | None:
        """The version that was read last."""
        return None if self._reader is None else self._reader.version

    def weights(self, only: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield weights that were read, on this process's device; all, or those with the names."""
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        for name, tensor in ({} if self._reader is None else self._reader.tensors).items():
            if only is None or name in only:
                yield name, tensor.to(device)


def checked_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype, or raise InputError unless it is one of floats, or None."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise InputError(f"dtype is one of torch's dtypes of floats, such as bfloat16, got {dtype!r}")


def facts_of(store: Store | str, version: Version) -> tuple[float, int]:
    """Return the share of elements that a version changes, and the bytes of its files."""
    entry = next(one for one in read_index(store).entries if one.version == version)
    return entry.changed / entry.elements, entry.bytes


def narrowed(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Return weights as they come; floats wider than ``dtype`` become ``dtype``.

    After an error of one, the others can still be asked for.
    """

    def narrow(weight: tuple[str, Tensor]) -> tuple[str, Tensor]:
        name, tensor = weight[0], weight[1].detach()
        wide = dtype is not None and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
        return name, tensor.to(dtype) if wide else tensor

    return map(narrow, weights)


def on_host(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copy weights to the host as they come, narrowed.

    The weights are walked to their end even if a copy fails: other ranks walk with this one.
    """
    coming = narrowed(weights, dtype)
    try:
        return {name: tensor.to("cpu", copy=True) for name, tensor in coming}
    finally:
        deque(coming, maxlen=0)


def agreed(own: object, group: dist.ProcessGroup) -> Any:
    """Return what rank 0 passes, on all ranks; or raise on all of them if one passes an exception.

    A rank raises its own exception, and the others a `CommunicationError` that tells it.
    """
    failed = isinstance(own, Exception)
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (failed, repr(own) if failed else own), group=group)
    if isinstance(own, Exception):
        raise own
    for rank, (has_failed, what) in enumerate(told):
        if has_failed:
            raise CommunicationError(f"rank {rank} failed: {what}")
    return told[0][1]


_MOST_TOLD = 1 << 16
"""How many bytes are read of what a server says of an error."""


class Routes:
    """Posts to a server.

    Parameters
    ----------
    url
        Such as ``http://host:8000``.
    timeout
        Seconds that an answer may take.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url.rstrip("/"), timeout

    def post(self, route: str, body: object = None) -> None:
        """Post to a route, or raise CommunicationError."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = Request(f"{self._url}/{route}", data, headers, method="POST")
        shown_url = f"{public_url(self._url)}/{route}"
        try:
            with urlopen(request, timeout=self._timeout):
                pass
        except HTTPError as error:
            told = shown(_told(error))
            raise CommunicationError(f"{shown_url}: {error.code} {told}") from error
        except (OSError, HTTPException) as error:
            raise CommunicationError(f"{shown_url}: {shown(repr(error))}") from error


def _told(error: HTTPError) -> str:
    """Return what a server says of an error, as far as it arrives."""
    try:
        with error:
            return error.read(_MOST_TOLD).decode(errors="replace")
    except IncompleteRead as cut:
        return cut.partial.decode(errors="replace")
    except (OSError, HTTPException) as lost:
        return f"{error.reason} ({lost!r})"
