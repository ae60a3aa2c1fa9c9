"""The side that trains: versions go into a store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sparcel._checks import check_callable, checked_flag, checked_whole
from sparcel.delta.applying import apply_, write_in_turn
from sparcel.delta.base import Cast, copied, remembered, served
from sparcel.delta.chunk import Chunk, Version, read_chunk
from sparcel.delta.encoding import CODES, encode_parts
from sparcel.delta.files import NOTHING_TO_PUBLISH, File, anchor_file, check_storable, delta_file
from sparcel.delta.index import Entry, Index, IndexWriter, file_name
from sparcel.delta.parts import (
    Part,
    Weights,
    elements_of,
    parts_of,
    tensors_of,
    ties_of,
    version_of,
)
from sparcel.delta.subscriber import Subscriber
from sparcel.errors import FormatError, InputError, VersionError, checked_name, shown
from sparcel.stores import Store, mapped, store_at


@dataclass(frozen=True)
class _Delta:
    chunks: list[bytes]
    read: list[Chunk]
    base: Version
    version: Version
    elements: int


class Publisher:
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
        checked_name(code, CODES, "code")
        checked_whole(anchor_every, "anchor_every", at_least=1)
        checked_whole(lag, "lag", at_least=0)
        if cast is not None:
            check_callable(cast, "cast")
        if bracketed and base is not None:
            raise InputError("a bracketed publisher keeps no base; leave base= out")
        if bracketed and cast is not None:
            raise InputError(
                "a bracketed publisher needs the same tensors each time, and a cast"
                " makes new ones; leave one of them out"
            )
        self.version: Version | None = None
        self._bracketed = bracketed
        self._noted: Mapping[str, Part] = {}
        self._store, self._code, self._cast = store_at(store), code, cast
        self._anchor_every, self._apart = anchor_every, checked_flag(apart, "apart")
        self._file = None if base is None else Path(base)
        self._base: dict[str, Tensor] = {}
        self._writer = secrets.token_hex(8)
        self._index_writer = IndexWriter(self._store, self._writer, lag)
        self._resume()

    def publish(self, weights: Weights, number: int | None = None) -> Version:
        """Publish weights, and return their version when it is durable.

        If the store fails, its error is raised, and `version` tells what has been published; the
        next publication goes on from there.

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
        tensors = served(tensors_of(weights), self._cast)
        parts = parts_of(tensors)
        if not parts:
            raise InputError(NOTHING_TO_PUBLISH)
        check_storable(parts)
        _check_whole(parts)
        number = self._index_writer.begin(number)
        if self.version != self._index.newest:  # an error came between a commit and the base
            self._resume()
        if self._bracketed:
            self.version = self._publish_bracketed(dict(tensors), parts, number)
        elif self.version is None:
            self._base = copied(parts, self._file)
            self.version = self._commit_anchor(version_of(self._base, number))
        else:
            self.version = self._publish_delta(parts, number)
        if self._since_anchor() >= self._anchor_every:
            self._publish_anchor()
        self._index_writer.prune()
        return self.version

    def _publish_delta(self, parts: Mapping[str, Part], number: int) -> Version:
        assert self.version is not None, "there is a base"
        delta = self._delta(parts, parts_of(self._base), self.version, number)
        self._commit_delta(delta)
        self._follow(delta)
        return delta.version

    def _follow(self, delta: _Delta) -> None:
        """Let the base follow by what was published; if that fails, it is read anew."""
        chunks, base = delta.read, parts_of(self._base)
        if any(one.new or one.leaving for one in chunks) or chunks[-1].ties != ties_of(base):
            apply_(self._base, chunks, self.version)
        else:
            write_in_turn(base, chunks)

    def _publish_bracketed(
        self, tensors: dict[str, Tensor], parts: Mapping[str, Part], number: int
    ) -> Version:
        """Publish a delta from the noted weights if its sum is right, else an anchor."""
        noted, self._noted = self._noted, {}  # until the new ones are noted
        self._base, version = tensors, version_of(tensors, number)
        told = self.version and noted and self._delta(parts, noted, self.version, number)
        noted = {}  # to make room for the new ones
        if told and told.version == version:
            self._commit_delta(told)
        else:
            self._commit_anchor(version)
        self._noted = remembered(tensors)
        return version

    def _delta(
        self, now: Mapping[str, Part], old: Mapping[str, Part], since: Version, number: int
    ) -> _Delta:
        chunks = list(encode_parts(now, old, self._code, since, number, apart=self._apart))
        read = [read_chunk(chunk) for chunk in chunks]
        version = since.after(number, sum(chunk.sum for chunk in read))
        return _Delta(chunks, read, since, version, elements_of(now))

    def _commit_delta(self, delta: _Delta) -> None:
        listed = delta.read if self._apart else ()
        file = delta_file(delta.chunks, delta.base, delta.version, listed)
        changed = sum(chunk.changed for chunk in delta.read)
        self._commit(delta.base, delta.version, file, delta.elements, changed)

    def _commit_anchor(self, version: Version) -> Version:
        file = anchor_file(self._base, version, for_store=True)
        elements = elements_of(parts_of(self._base))
        self._commit(None, version, file, elements, elements)
        return version

    def _commit(
        self,
        base: Version | None,
        version: Version,
        file: Iterable[bytes | memoryview],
        elements: int,
        changed: int,
    ) -> None:
        name = file_name(base, version.number, self._writer)
        size = self._index_writer.write(name, file)
        self._index_writer.prove(name, version)
        self._index_writer.commit(base, version, (name,), size, elements, changed)

    def _publish_anchor(self) -> None:
        """Publish the last version as an anchor, and a delta to it from the anchor before."""
        assert self.version is not None, "there is a version"
        before = self._last_anchor()
        steps = [entry for entry in self._index.entries if entry.version == self.version]
        if all(entry.base != before.version for entry in steps):
            self._publish_merged(before, self.version)
        self._commit_anchor(self.version)

    def _publish_merged(self, before: Entry, version: Version) -> None:
        """Publish a delta from an anchor to the version, unless the anchor is damaged."""
        name = before.names[0]  # others follow where ranks wrote chunks, which are no tensors
        try:
            old = parts_of(File(mapped(self._store, name), name).tensors())
        except (FormatError, OSError):
            return
        merged = self._delta(parts_of(self._base), old, before.version, version.number)
        if merged.version == version:
            self._commit_delta(merged)

    @property
    def _index(self) -> Index:
        return self._index_writer.index

    def _resume(self) -> None:
        """Take the newest version of the store as the base.

        If it cannot be read, what is published next is a whole model.
        """
        self._base, self._noted = {}, {}
        self.version = self._index.newest if self._bracketed else None
        if self._index.newest is None or self._bracketed:
            return
        reader = Subscriber(self._store)
        try:
            reader.update()
        except (FormatError, VersionError):
            return
        tensors = dict(reader.tensors)
        self._base = copied(parts_of(tensors), self._file) if self._file else tensors
        self.version = reader.version

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
