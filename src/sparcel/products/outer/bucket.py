"""A communicator of ranks that reach the same files, and not one another.

A message is a file. The place needs no more than `stores.ExclusiveStore` says: a folder
that all ranks mount, or an object store.
"""

from __future__ import annotations

import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.distributed import DistStoreError
from typing_extensions import override

from sparcel.core.comm import (
    Arrived,
    Bounds,
    Engine,
    Failure,
    Leaving,
    LostPeerError,
    PeerErrors,
    Rendezvous,
)
from sparcel.core.ops import Op
from sparcel.errors import MismatchError
from sparcel.products.outer.files import BucketStore, created, looks, named

_ANSWER_SECONDS = 10.0
"""How long a few requests to a far store may take."""

_MAGIC, _VERSION = b"spmS", 2

_HEAD = struct.Struct("<4sHHIQ")
"""What a message begins with: magic, version, ranks, call, bytes.

Then come, 32 bits each, how many messages the sender has sent to each rank, this one included; how
many it has read of each rank; and a checksum of all that and of the payload.
"""

_SUM_BYTES, _ALIGNED_BYTES = 4, 64


def _causes(prefix: str) -> set[str]:
    """Return the files of which one is there if the communicator with this prefix has failed.

    It may be split from another one, whose failure is its own.
    """
    above = [prefix[: slash.end()] for slash in re.finditer("/", prefix)]
    return {named(one + Failure.KEY) for one in ["", *above]}


class BucketEngine:
    """Messages as files, for one communicator.

    Messages that go to several ranks alike are one file. Who reads a file that is for nobody else
    removes it. Any other is removed by its writer, when messages have come of all its readers that
    say so, or at the end.

    Parameters
    ----------
    bucket
        Where the files are, with a prefix that nothing else there has.
    names
        The numbers by which errors name the ranks, by rank.
    rank
        This process's rank, an index into ``names``.
    timeout
        Seconds that an exchange may wait after it has written.
    is_silent
        Whether the rank of this number is taken for dead, so that nobody waits for it.
    """

    device = torch.device("cpu")
    carrier = "a bucket"
    hides_aborts = False

    def __init__(
        self,
        bucket: BucketStore,
        names: list[int],
        rank: int,
        timeout: float,
        is_silent: Callable[[int], bool],
    ) -> None:
        self.rank, self.size, self.timeout = rank, len(names), timeout
        self.waiting, self._is_silent = False, is_silent
        self._errors, self._names = PeerErrors(names, rank), names
        self._pause, self._place, self._now = bucket.pause, bucket.messages, bucket.found
        self._stem = f"{named(bucket.prefix + 'sent')}!"
        self._causes = _causes(bucket.prefix)
        self._aborted = threading.Event()
        self._sent, self._read = [0] * self.size, [0] * self.size
        self._files, self._files_read = 0, [0] * self.size
        self._kept: dict[str, dict[int, int]] = {}
        self._torn: dict[int, str] = {}

    def exchange(self, sends: Leaving, receives: Bounds, call: int, control: int) -> Arrived:
        """See `Engine.exchange`; messages arrive whole.

        Raises
        ------
        LostPeerError
            When a message does not come whole within the timeout, or the place fails.
        MismatchError
            When a message belongs to another call, is longer than its bound, or was written by
            another version of sparcel.
        """
        alike: dict[tuple[int, ...], list[int]] = {}
        for peer, parts in sends.items():
            alike.setdefault(tuple(map(id, parts)), []).append(peer)
        self.waiting = True
        try:
            for peers in alike.values():
                self._write(peers, sends[peers[0]], call)
            return self._collect(receives, call)
        except OSError as error:
            if self._aborted.is_set():  # which removes what is being written, too
                raise self._errors.lost() from error
            raise self._lost(f"cannot use {self._place}: {error!r}", late=True) from error
        finally:
            self.waiting = False
            if self._aborted.is_set():
                self._remove_own()

    def all_reduce(self, tensor: Tensor, op: Op, call: int) -> None:
        """See `Engine.all_reduce`; every rank adds up all tensors, in the order of ranks."""
        ranks, own = range(self.size), tensor.view(-1)
        others, raw = [rank for rank in ranks if rank != self.rank], own.view(torch.uint8)
        came = self.exchange(
            {rank: [raw] for rank in others}, dict.fromkeys(others, raw.numel()), call, 0
        )
        parts = [came[rank][0].view(tensor.dtype) if rank in came else own for rank in ranks]
        own.copy_(reduce(op.apply, parts))

    def probe(self) -> None:
        """Do nothing: the waiting thread looks for failures itself."""

    def lost(self) -> list[int]:
        """See `Engine.lost`."""
        return []

    def abort(self) -> None:
        """See `Engine.abort`; removes what this rank has written."""
        self._aborted.set()
        self._remove_own()

    def _write(self, peers: list[int], parts: Sequence[Tensor], call: int) -> None:
        for peer in peers:
            self._sent[peer] += 1
        payload = [part.numpy().data for part in parts]
        nbytes = sum(map(len, payload))
        head = _HEAD.pack(_MAGIC, _VERSION, self.size, call, nbytes)
        head += struct.pack(f"<{2 * self.size}I", *self._sent, *self._read)
        head += _checksum(head, payload)
        self._files += 1
        readers = sum(1 << peer for peer in peers)
        name = f"{self._stem}{self.rank}.{self._files}.{readers:x}"
        if not created(self._place, name, [head.ljust(_body_at(self.size), b"\0"), *payload]):
            raise MismatchError(
                f"rank {self._names[self.rank]} found a message of its own in {self._place} that it"
                " has not written; another process has its rank, or an earlier run its place"
            )
        if len(peers) > 1:
            self._kept[name] = {peer: self._sent[peer] for peer in peers}

    def _collect(self, receives: Bounds, call: int) -> Arrived:
        arrived: Arrived = {}
        self._torn.clear()
        failures: list[OSError] = []
        for _ in looks(self._pause, self.timeout, self._aborted):
            if self._aborted.is_set():
                raise self._errors.lost()
            try:
                self._look(receives, call, arrived)
                failures.clear()
            except OSError as error:  # it may pass
                failures = [error.with_traceback(None)]
            if len(arrived) == len(receives):
                return {peer: arrived[peer] for peer in receives}
            missing = [self._names[peer] for peer in receives if peer not in arrived]
            if silent := [one for one in missing if self._is_silent(one)]:
                raise self._lost(f"waited for rank {silent[0]}, which gives no sign of life", False)
        if failures:
            raise failures.pop()
        late = next(peer for peer in receives if peer not in arrived)
        if late in self._torn:
            raise self._lost(f"waited {self.timeout:g} s for {self._torn[late]}", late=True)
        raise self._errors.late(self.timeout, late)

    def _look(self, receives: Bounds, call: int, arrived: Arrived) -> None:
        """Take in the messages that are there."""
        if len(arrived) == len(receives):
            return
        names = self._now.names()
        there: dict[int, list[tuple[int, str, bool]]] = {}
        pattern = re.compile(re.escape(self._stem) + r"(\d+)\.(\d+)\.([0-9a-f]+)")
        for match in filter(None, map(pattern.fullmatch, names)):
            peer, number, readers = int(match[1]), int(match[2]), int(match[3], 16)
            wanted = peer in receives and peer not in arrived
            if wanted and readers >> self.rank & 1 and number > self._files_read[peer]:
                there.setdefault(peer, []).append((number, match[0], readers == 1 << self.rank))
        for peer, files in there.items():
            number, name, alone = min(files)
            body = self._parse(peer, self._now.read(name), call, receives[peer])
            if body is None:
                continue
            arrived[peer] = [body]
            self._files_read[peer] = number
            self._read[peer] += 1
            if alone:
                self._place.remove(name)
        if len(arrived) < len(receives) and not self._causes.isdisjoint(names):
            raise self._errors.lost()  # another rank has published why

    def _parse(self, peer: int, data: memoryview, call: int, at_most: int) -> Tensor | None:
        """Return the payload of the next message of a rank, or None if it is not that, or torn."""
        who = f"a message of rank {self._names[peer]}"
        self._torn[peer] = f"{who}, which is torn in {self._place}"
        if len(data) < _HEAD.size or data[:4] != _MAGIC:
            return None
        _, version, size, theirs, nbytes = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise MismatchError(
                f"rank {self._names[peer]} writes messages of version {version}, rank"
                f" {self._names[self.rank]} reads version {_VERSION}; install the same sparcel"
            )
        counted, begin = _HEAD.size + 8 * size, _body_at(size)
        body, checksum = data[begin:], data[counted : counted + _SUM_BYTES]
        if len(body) != nbytes or _checksum(data[:counted], [body]) != checksum:
            return None
        counts = struct.unpack_from(f"<{2 * size}I", data, _HEAD.size)
        if theirs != call or size != self.size:
            raise self._errors.other_call(peer)
        if counts[self.rank] != self._read[peer] + 1:  # a listing may lack one that was before it
            self._torn[peer] = f"{who} before one that is in {self._place}"
            return None
        if nbytes > at_most:
            raise self._errors.other_length(peer, nbytes, f"at most {at_most}")
        self._forget(peer, counts[size + self.rank])
        return (
            torch.frombuffer(body, dtype=torch.uint8)
            if nbytes
            else torch.empty(0, dtype=torch.uint8)
        )

    def _forget(self, peer: int, read: int) -> None:
        """Remove the files that all their readers have read; ``peer`` has read so many messages."""
        for name, unread in list(self._kept.items()):
            if unread.get(peer, read + 1) <= read:
                del unread[peer]
            if not unread:
                self._place.remove(name)
                del self._kept[name]

    def _remove_own(self) -> None:
        with suppress(OSError):
            for name in self._place.names():
                if name.startswith(f"{self._stem}{self.rank}."):
                    self._place.remove(name)

    def _lost(self, what: str, late: bool) -> LostPeerError:
        return LostPeerError(f"rank {self._names[self.rank]} {what}", late)


def _body_at(size: int) -> int:
    """Return where the payload begins, so that values in it are aligned."""
    return -(-(_HEAD.size + 8 * size + _SUM_BYTES) // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _checksum(head: bytes | memoryview, payload: Iterable[memoryview]) -> bytes:
    total = zlib.crc32(head)
    for part in payload:
        total = zlib.crc32(part, total)
    return total.to_bytes(_SUM_BYTES, "little")


class BucketFailure(Failure):
    """The failure state of ranks that share a bucket; the last rank to finish clears the prefix."""

    def __init__(self, bucket: BucketStore, size: int, timeout: float) -> None:
        super().__init__(bucket, size, _ANSWER_SECONDS, bucket.pause)
        self._bucket, self._timeout = bucket, timeout
        self._failed = False

    def compare(self, position: str, rank: int, history: str) -> int | None:
        """See `Failure.compare`; who is done writes nothing that nobody would remove."""
        return None if self._announced else super().compare(position, rank, history)

    def finish(self, patience: float) -> bool:
        """See `Failure.finish`; others may take as long for the last messages as for any."""
        finished = super().finish(self._timeout if patience else 0.0)
        if finished:
            with suppress(DistStoreError):
                if self._store.add("left", 1) == self._size:
                    self._bucket.clear()
        return finished

    def _finish(self, patience: float) -> bool:
        return super()._finish(patience) and not self._failed

    def _all_done(self) -> bool:
        causes = _causes(self._bucket.prefix)
        self._failed = not causes.isdisjoint(self._bucket.place.names())
        return self._failed or super()._all_done()


@dataclass(frozen=True)
class BucketRendezvous(Rendezvous):
    """Where ranks meet that reach one bucket, and not one another."""

    store: BucketStore
    is_silent: Callable[[int], bool] = lambda _: False

    def engine(self) -> Engine:
        """See `Rendezvous.engine`; nobody waits for the others before the first exchange."""
        return BucketEngine(self.store, self.members, self.rank, self.timeout, self.is_silent)

    @override
    def failure(self) -> Failure:
        return BucketFailure(self.store, len(self.members), self.timeout)
