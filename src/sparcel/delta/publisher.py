"""The side that trains: versions go into a store."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor, nn

from sparcel._checks import whole_number
from sparcel.delta.applying import apply_
from sparcel.delta.checks import check_pace
from sparcel.delta.chunk import Version, read_chunk
from sparcel.delta.copies import copied
from sparcel.delta.encoding import CODES, encode, encode_parts, version_of
from sparcel.delta.files import File, anchor_file, delta_file
from sparcel.delta.index import INDEX, Entry, Index, read_index, write_index
from sparcel.delta.parts import Part, parts_of, untied
from sparcel.delta.remembered import remembered
from sparcel.delta.stores import Folder, Store
from sparcel.delta.subscriber import Subscriber
from sparcel.errors import FormatError, InputError, VersionError, known


class Publisher:
    """Publishes versions of a model's weights: a whole one first, then what changes.

    It keeps a copy of the last version, its base, which moves on only when a version is durable. So
    a publication that fails, or a process that is killed, loses nothing: the next version is told
    from the last one that subscribers can see. A new publisher of a store goes on from its newest
    version, whatever the weights of the trainer are by then.

    Parameters
    ----------
    store
        Where versions go: see `store_at`. It has one publisher at a time; when another one has
        published meanwhile, `publish` raises `VersionError`.
    code
        As for `encode`.
    anchor_every
        A whole model is published every so many versions, for those who join or fall behind.
    lag
        How many versions a subscriber may be behind and still find all deltas since. What nobody
        within that lag needs is removed.
    base
        A file for the copy of the last version, which is then mapped instead of held in memory; the
        publisher makes it anew.
    bracketed
        Keep one byte an element instead of a copy: an optimiser moves weights by few units in the
        last place, so the last eight bits tell what they were. The weights published must then be
        the same tensors each time, changed in place between two calls. If one has moved by 128
        units or more, which the sum of the version tells, the version is a whole model. So is the
        first one of each publisher.

    Attributes
    ----------
    version
        The last version, or None.
    """

    def __init__(
        self,
        store: Store,
        *,
        code: str = "exponents",
        anchor_every: int = 50,
        lag: int = 20,
        base: str | os.PathLike[str] | None = None,
        bracketed: bool = False,
    ) -> None:
        known(code, CODES, "code")
        check_pace(anchor_every, lag)
        if bracketed and base is not None:
            raise InputError("a bracketed publisher keeps no base; leave base= out")
        self.version: Version | None = None
        self._bracketed = bracketed
        self._noted: Mapping[str, Part] = {}
        self._store, self._code = store, code
        self._anchor_every, self._lag = anchor_every, lag
        self._file = None if base is None else Path(base)
        self._base: dict[str, Tensor] = {}
        self._writer = secrets.token_hex(8)
        self._tidied = False
        self._index = read_index(store)
        self._resume()

    def publish(
        self, weights: nn.Module | Mapping[str, Tensor], number: int | None = None
    ) -> Version:
        """Publish weights, and return their version when it is durable.

        If the store fails, its error is raised, and `version` tells what has been published; the
        next publication goes on from there.

        Parameters
        ----------
        weights
            A module, whose state dict is published, or tensors by name, on any device. They must
            not change meanwhile.
        number
            The version's number, larger than the last one's; by default the next one.

        Raises
        ------
        VersionError
            If another publisher has written to the store.
        """
        tensors = weights.state_dict() if isinstance(weights, nn.Module) else weights
        self._catch_up()
        last = self._index.newest
        least = last.number + 1 if last else 0
        hint = f"; versions are numbered upwards, and the last one is {last}" if last else ""
        number = least if number is None else whole_number(number, "number", least, hint=hint)
        if self._bracketed:
            self.version = self._publish_bracketed(dict(tensors), number)
        elif self.version is None:
            self._base = copied(parts_of(tensors), self._file)
            self.version = self._commit_anchor(version_of(self._base, number))
        else:
            self.version = self._publish_delta(tensors, number)
        if self._since_anchor() >= self._anchor_every:
            self._publish_anchor()
        self._prune()
        return self.version

    def _publish_delta(self, tensors: Mapping[str, Tensor], number: int) -> Version:
        assert self.version is not None, "there is a base"
        chunks = list(
            encode(tensors, self._base, code=self._code, since=self.version, target=number)
        )
        version = self._commit_delta(chunks, self.version, number)
        moved = apply_(self._base, chunks, self.version)
        assert moved.version == version, "a delta makes what it says"
        return version

    def _publish_bracketed(self, tensors: dict[str, Tensor], number: int) -> Version:
        """Publish what has changed since weights were noted, if that tells all, and note them."""
        since, self.version = self.version, None
        self._base, version = tensors, version_of(tensors, number)
        told: list[bytes] = []
        if since is not None:
            now = parts_of(tensors)
            told = list(encode_parts(now, self._noted, self._code, since, number))
        if since is not None and _made_by(told, since, number) == version:
            self._commit_delta(told, since, number)
        else:
            self._commit_anchor(version)
        self._noted = remembered(tensors)
        return version

    def _commit_delta(self, chunks: list[bytes], base: Version, number: int) -> Version:
        read = [read_chunk(chunk) for chunk in chunks]
        version = base.after(number, sum(chunk.sum for chunk in read))
        name = self._named(f"delta-{base.number:010}-{number:010}")
        entry = Entry(
            kind="delta",
            base=base,
            version=version,
            names=(name,),
            bytes=self._store.write(name, delta_file(chunks, base, version)),
            elements=self._elements(),
            changed=sum(chunk.changed for chunk in read),
            time=time.time(),
        )
        self._commit(self._index.with_entries(entry))
        return version

    def _commit_anchor(self, version: Version) -> Version:
        name = self._named(f"anchor-{version.number:010}")
        elements = self._elements()
        entry = Entry(
            kind="anchor",
            base=None,
            version=version,
            names=(name,),
            bytes=self._store.write(name, anchor_file(self._base, version)),
            elements=elements,
            changed=elements,
            time=time.time(),
        )
        self._commit(self._index.with_entries(entry))
        return version

    def _named(self, name: str) -> str:
        """Return the name of a file, which no other publisher writes."""
        return f"{name}-{self._writer}.safetensors"

    def _publish_anchor(self) -> None:
        """Publish the last version as a whole, and what makes it of the anchor before."""
        assert self.version is not None, "there is a version"
        before = self._last_anchor()
        steps = [entry for entry in self._index.entries if entry.version == self.version]
        if isinstance(self._store, Folder) and all(e.base != before.version for e in steps):
            merged = self._merged(self._store, before, self.version)
            if merged:
                self._commit_delta(merged, before.version, self.version.number)
        self._commit_anchor(self.version)

    def _merged(self, store: Folder, before: Entry, version: Version) -> list[bytes]:
        """Return what makes the version of an anchor; nothing if that is not what it was."""
        name = before.names[0]  # others follow where ranks wrote chunks, which are no tensors
        try:
            old = File(store.mapped(name), name).tensors()
        except (FormatError, OSError):
            return []
        chunks = list(
            encode(self._base, old, code=self._code, since=before.version, target=version.number)
        )
        return chunks if _made_by(chunks, before.version, version.number) == version else []

    def _commit(self, index: Index) -> None:
        there = read_index(self._store)
        if there != self._index:
            raise self._not_mine(there)
        index = Index(index.entries, self._writer)
        write_index(self._store, index)
        self._index = index

    def _not_mine(self, there: Index) -> VersionError:
        return VersionError(
            f"another publisher has written to {self._store}: its newest version is"
            f" {there.newest}, not {self._index.newest}; a store has one publisher at a time"
        )

    def _prune(self) -> None:
        """Remove what nobody needs: from the index first."""
        kept = self._index.pruned(self._lag)
        dropped = self._index.names - kept.names
        if dropped:
            self._commit(kept)
        for name in dropped | self._left_behind():
            self._store.remove(name)
        self._tidied = True

    def _left_behind(self) -> set[str]:
        """Return the files that publishers before wrote and did not commit; now they cannot."""
        there: list[str] = []
        if not self._tidied:
            with suppress(InputError):
                there = self._store.names()
        ours = ("delta-", "anchor-", f"{INDEX}.")
        listed = {INDEX, *self._index.names}
        return {
            name
            for name in there
            if name.startswith(ours) and name not in listed and self._writer not in name
        }

    def _catch_up(self) -> None:
        """Go on from the newest version, also if an error came between a commit and its base."""
        there = read_index(self._store)
        if there != self._index and there.writer != self._writer:
            raise self._not_mine(there)
        self._index = there
        if self.version != self._index.newest:
            self._resume()

    def _resume(self) -> None:
        """Take the newest version of the store as the base.

        If it cannot be read, what is published next is a whole model.
        """
        self._base, self.version = {}, None
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

    def _elements(self) -> int:
        return sum(part.piece.count for part in untied(parts_of(self._base)).values())


def _made_by(chunks: Iterable[bytes], base: Version, number: int) -> Version:
    """Return the version that chunks make of their base."""
    return base.after(number, sum(read_chunk(chunk).sum for chunk in chunks))
