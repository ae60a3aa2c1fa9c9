"""The side that trains: versions go into a store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from sparcel.core._checks import check_callable, checked_flag, checked_whole
from sparcel.core.comm import Communicator
from sparcel.errors import FormatError, InputError, VersionError, checked_name, shown
from sparcel.products.delta.base import Cast, copied, followed, remembered, served
from sparcel.products.delta.chunk import NOTHING, Chunk, Version, read_chunk
from sparcel.products.delta.elements import signed
from sparcel.products.delta.encoding import CODES, encode_parts
from sparcel.products.delta.files import (
    NOTHING_TO_PUBLISH,
    File,
    anchor_file,
    check_storable,
    delta_file,
)
from sparcel.products.delta.index import Entry, Index, IndexWriter, file_name
from sparcel.products.delta.parts import (
    Part,
    Weights,
    elements_of,
    parts_of,
    sum_of_parts,
    tensors_of,
)
from sparcel.products.delta.subscriber import Subscriber
from sparcel.products.stores import Store, mapped, store_at

T = TypeVar("T")


@dataclass(frozen=True)
class Coded:
    """A version as chunks of this rank: what they say, their lengths, and these bytes."""

    base: Version | None
    """None for a whole model."""
    version: Version
    told: Sequence[Chunk]
    sizes: Sequence[int]
    chunks: Iterable[bytes]


class PublisherBase:
    """What publishers have in common: that of a process alone, and that of a group of ranks."""

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        code: str,
        anchor_every: int,
        lag: int,
        cast: Cast | None,
        apart: bool,
        comm: Communicator | None = None,
    ) -> None:
        checked_name(code, CODES, "code")
        checked_whole(anchor_every, "anchor_every", at_least=1)
        checked_whole(lag, "lag", at_least=0)
        if cast is not None:
            check_callable(cast, "cast")
        self.version: Version | None = None
        self._code, self._anchor_every, self._cast = code, anchor_every, cast
        self._apart = checked_flag(apart, "apart")
        self._comm = comm
        self._rank, self._ranks = (0, 1) if comm is None else (comm.rank, comm.size)
        self._base: dict[str, Part] = {}
        self._based: Version | None = None
        """The version that the base is."""
        self._outcome = "nothing is published"
        self._writer = f"{self._numbers(secrets.randbits(62))[0]:016x}"
        self._index_writer = self._together(lambda: IndexWriter(store_at(store), self._writer, lag))

    def _served(self, weights: Weights) -> tuple[Mapping[str, Tensor], dict[str, Part]]:
        """Return what is published of weights, as tensors and as the parts that are here."""
        tensors = served(tensors_of(weights), self._cast)
        parts = parts_of(tensors)
        check_storable(parts)
        return tensors, parts

    def _chunks(
        self, now: Mapping[str, Part], old: Mapping[str, Part], since: Version, number: int
    ) -> Iterable[bytes]:
        shard = self._rank, self._ranks
        return encode_parts(now, old, self._code, since, number, shard, self._apart)

    def _coded(
        self, now: Mapping[str, Part], old: Mapping[str, Part], since: Version, number: int
    ) -> Coded:
        """Code what differs from a version."""
        chunks = self._together(lambda: list(self._chunks(now, old, since, number)))
        told = [read_chunk(chunk) for chunk in chunks]
        return Coded(since, self._made(told, since, number), told, [*map(len, chunks)], chunks)

    def _made(self, told: Iterable[Chunk], since: Version, number: int) -> Version:
        """Return the version that the chunks of all ranks make of another one."""
        own = sum(chunk.sum for chunk in told)
        return since.after(number, sum(self._numbers(signed(own))))

    def _commit_chunks(self, coded: Coded, parts: Mapping[str, Part]) -> Version:
        """Publish the chunks of a version, of which this rank has these parts."""
        base, listed = coded.base or NOTHING, coded.told if self._apart else ()
        file = delta_file(coded.chunks, base, coded.version, listed, coded.sizes)
        changed = sum(chunk.changed for chunk in coded.told)
        return self._commit(coded.base, coded.version, file, elements_of(parts), changed)

    def _commit(
        self,
        base: Version | None,
        version: Version,
        file: Iterable[bytes | memoryview],
        elements: int,
        changed: int,
    ) -> Version:
        """Write a file, and list those of all ranks: then the version is there."""
        ranks = [None] if self._comm is None else range(self._ranks)
        names = tuple(file_name(base, version.number, self._writer, rank) for rank in ranks)
        size = self._together(lambda: self._index_writer.write(names[self._rank], file))
        other = names[(self._rank + 1) % self._ranks]  # which may be on another host
        self._together(lambda: self._index_writer.prove(other, version))
        counts = [sum(self._numbers(count)) for count in (size, elements, changed)]
        if self.version != version:
            self._outcome = f"the index tells whether version {version} is published"
        self._on_first(lambda: self._index_writer.commit(base, version, names, *counts))
        self._outcome = f"version {version} is published, but what had to follow it is not done"
        self.version = version
        return version

    def _numbers(self, number: int) -> list[int]:
        """Return the number that each rank passes."""
        return [number] if self._comm is None else self._comm.gather_numbers(number)

    def _together(self, work: Callable[[], T]) -> T:
        """Do this rank's work; raise on all ranks if it fails on one."""
        result, error = None, None
        try:
            result = work()
        except Exception as failure:
            error = failure
        failed = self._numbers(int(error is not None))
        if error is not None:
            error.add_note(self._outcome)
            raise error
        if any(failed):
            raise VersionError(f"rank {failed.index(1)} failed; {self._outcome}")
        return result  # type: ignore[return-value]  # there is one if nothing failed

    def _on_first(self, work: Callable[[], T]) -> T | None:
        """Do work on rank 0, and return its result there."""
        return self._together(lambda: work() if self._rank == 0 else None)


class Publisher(PublisherBase):
    """Publishes versions of a model's weights: a whole one first, then what changes.

    It keeps a copy of the last version, its base, which moves on only when a version is durable. So
    a publication that fails, or a process that is killed, loses nothing: the next version is told
    from the last one that subscribers can see. A new publisher of a store goes on from its newest
    version, whatever the weights of the trainer are by then.

    Parameters
    ----------
    store
        Where versions go: a store, or a path or URL as for `store_at`. It has one publisher at a
        time; when another one has published meanwhile, `publish` raises `VersionError`.
    code
        As for `encode`.
    anchor_every
        A whole model is published every so many versions, for those who join or fall behind. With
        it comes a delta from the one before, which is read from the store for that.
    lag
        How many versions a subscriber may be behind and still find all deltas since. What nobody
        within that lag needs is removed.
    cast
        What is published in the place of a tensor: a function of its name and the tensor that
        returns tensors by name, such as eight bits and their scales, of its values alone. So what
        is compared, counted in sums and served has the bits that an engine loads. What it makes of
        all tensors is in memory while they are published.
    apart
        Whether each chunk is of one tensor, and files list which: for subscribers that serve some
        tensors, or slices of these. A file has some 150 bytes more for each tensor that changes.
    base
        A file for the copy of the last version, which is then mapped instead of held in memory; the
        publisher makes it anew.
    bracketed
        Keep one byte an element instead of a copy: an optimiser moves weights by few units in the
        last place, so the last eight bits tell what they were. The weights published must then be
        the same tensors each time, changed in place between two calls. If one has moved by 128
        units or more, which the sum of the version tells, the version is a whole model. So is the
        first one of each publisher. Tensors with many equal small weights, such as zeros, are
        copied all the same.

    Attributes
    ----------
    version
        The last version, or None.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        code: str = "exponents",
        anchor_every: int = 50,
        lag: int = 20,
        cast: Cast | None = None,
        apart: bool = False,
        base: str | os.PathLike[str] | None = None,
        bracketed: bool = False,
    ) -> None:
        if bracketed and base is not None:
            raise InputError("a bracketed publisher keeps no base; leave base= out")
        if bracketed and cast is not None:
            raise InputError(
                "a bracketed publisher needs the same tensors each time, and a cast"
                " makes new ones; leave one of them out"
            )
        super().__init__(store, code, anchor_every, lag, cast, apart)
        self._bracketed, self._file = bracketed, None if base is None else Path(base)
        self._resume()

    def publish(self, weights: Weights, number: int | None = None) -> Version:
        """Publish weights, and return their version when it is durable.

        If the store fails, its error is raised, or one that tells it, and `version` tells what has
        been published; the next publication goes on from there.

        Parameters
        ----------
        weights
            A module, whose state dict is published without extra state, or tensors by name, on any
            device. They must not change meanwhile. What DDP, FSDP, `torch.compile` and activation
            checkpoints put into names is taken off.
        number
            The version's number, larger than the last one's; by default the next one.

        Raises
        ------
        InputError
            If a tensor cannot be published: one of a dtype that safetensors lacks, or that several
            processes hold parts of, for one. Nothing is published then.
        VersionError
            If another publisher has written to the store, or its index is lost.
        """
        self._outcome = "this version is not published"
        _, parts = self._served(weights)
        if not parts:
            raise InputError(NOTHING_TO_PUBLISH)
        _check_whole(parts)
        number = self._index_writer.begin(number)
        if self._based != self._index.newest:  # an error came between a commit and the base
            self._resume()
        if self._bracketed:
            version = self._publish_bracketed(parts, number)
        elif self._based is None:
            self._base = copied(parts, self._file)
            version = self._commit_anchor(self._base, Version(number, sum_of_parts(self._base)))
        else:
            coded = self._coded(parts, self._base, self._based, number)
            version = self._commit_chunks(coded, parts)
            self._base = followed(self._base, parts, coded.told)
        self._based = version
        if self._since_anchor() >= self._anchor_every:
            self._publish_anchor(parts if self._bracketed else self._base, version)
        self._index_writer.prune()
        return version

    def _publish_bracketed(self, parts: Mapping[str, Part], number: int) -> Version:
        """Publish a delta from what is noted if its sum is right, else an anchor."""
        noted, self._base = self._base, {}  # until the new weights are noted
        version, coded = Version(number, sum_of_parts(parts)), None
        if noted and self._based is not None:
            coded = self._coded(parts, noted, self._based, number)
            noted.clear()  # to make room for the new ones
        if coded is not None and coded.version == version:
            self._commit_chunks(coded, parts)
        else:
            self._commit_anchor(parts, version)
        self._base = remembered(parts)
        return version

    def _commit_anchor(self, parts: Mapping[str, Part], version: Version) -> Version:
        tensors, elements = {name: part.local for name, part in parts.items()}, elements_of(parts)
        file = anchor_file(tensors, version, for_store=True)
        return self._commit(None, version, file, elements, elements)

    def _publish_anchor(self, parts: Mapping[str, Part], version: Version) -> None:
        """Publish the last version as an anchor, and a delta to it from the anchor before."""
        before = self._last_anchor()
        steps = [entry for entry in self._index.entries if entry.version == version]
        if all(entry.base != before.version for entry in steps):
            self._publish_merged(before, parts, version)
        self._commit_anchor(parts, version)

    def _publish_merged(self, before: Entry, parts: Mapping[str, Part], version: Version) -> None:
        """Publish a delta from an anchor to the version, unless the anchor is damaged."""
        name = before.names[0]  # others follow where ranks wrote chunks, which are no tensors
        try:
            old = parts_of(File(mapped(self._index_writer.store, name), name).tensors())
        except (FormatError, OSError):
            return
        merged = self._coded(parts, old, before.version, version.number)
        if merged.version == version:
            self._commit_chunks(merged, parts)

    @property
    def _index(self) -> Index:
        return self._index_writer.index

    def _resume(self) -> None:
        """Take the newest version of the store as the base.

        If it cannot be read, what is published next is a whole model.
        """
        self._base = {}
        self.version = self._based = self._index.newest if self._bracketed else None
        if self._index.newest is None or self._bracketed:
            return
        reader = Subscriber(self._index_writer.store)
        try:
            reader.update()
        except (FormatError, VersionError):
            return
        parts = parts_of(reader.tensors)
        self._base = copied(parts, self._file) if self._file else parts
        self.version = self._based = reader.version

    def _last_anchor(self) -> Entry:
        return next(entry for entry in reversed(self._index.entries) if entry.kind == "anchor")

    def _since_anchor(self) -> int:
        """Return how many versions there are since the last anchor."""
        last = self._last_anchor().version.number
        numbers = {entry.version.number for entry in self._index.entries}
        return sum(number > last for number in numbers)


def _check_whole(parts: Mapping[str, Part]) -> None:
    """Raise InputError unless this process holds all elements of each tensor."""
    for name, part in parts.items():
        if part.piece.count < part.piece.size:
            raise InputError(
                f"{shown(name)} is cut over several processes, of which this one holds"
                f" {part.piece.count}"
                f" of {part.piece.size} elements; publish it by a ShardedPublisher"
            )
