"""Versions from a trainer that is sharded over several processes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparcel.comm import Group, resolve
from sparcel.delta.applying import found_in_parts, swap_all
from sparcel.delta.bits import signed
from sparcel.delta.checks import check_pace
from sparcel.delta.chunk import Version, read_chunk
from sparcel.delta.copies import copied
from sparcel.delta.encoding import CODES, encode_parts
from sparcel.delta.files import delta_file
from sparcel.delta.index import Entry, Index, read_index, write_index
from sparcel.delta.parts import Part, parts_of, ties_of, untied
from sparcel.delta.stores import Store
from sparcel.errors import VersionError, known

T = TypeVar("T")

_NOTHING = Version(0, 0)
"""What a whole model is told from: the version without tensors."""


class ShardedPublisher:
    """Publishes versions of a model whose tensors are cut over ranks, as by FSDP2; all ranks call.

    Each rank compares, codes and writes what it holds: its shards of DTensors, one rank for all
    that hold the same, and rank 0 the plain tensors. Rank 0 commits a version when all ranks have
    written theirs, so it is there from all of them, or not at all. Subscribers see one version of
    whole tensors.

    The first version is a whole model, also where the store has some already, and so is the next
    one after an error.

    Parameters
    ----------
    store
        A place that all ranks reach.
    group
        The ranks: as for `sparcel.all_reduce`.
    code, anchor_every, lag
        As for `Publisher`.

    Attributes
    ----------
    version
        The last version, or None.
    """

    def __init__(
        self,
        store: Store,
        group: Group = None,
        *,
        code: str = "exponents",
        anchor_every: int = 50,
        lag: int = 20,
    ) -> None:
        known(code, CODES, "code")
        check_pace(anchor_every, lag)
        self.version: Version | None = None
        self._store, self._code = store, code
        self._anchor_every, self._lag = anchor_every, lag
        self._comm = resolve(group)
        self._writer = f"{self._comm.gather_numbers(secrets.randbits(62))[0]:016x}"
        self._mine = False
        self._base: dict[str, Part] = {}
        self._deltas = 0

    def publish(self, weights: nn.Module | Mapping[str, Tensor]) -> Version:
        """Publish weights, and return their version when it is durable, on all ranks.

        Raises
        ------
        VersionError
            If another rank failed, or another publisher has written to the store. A rank that fails
            raises its own error. The store is then as before.
        """
        tensors = weights.state_dict() if isinstance(weights, nn.Module) else weights
        since, self.version = self.version, None  # until all is done
        parts = self._together(lambda: _owned(tensors, self._comm.rank))
        number = self._from_first(self._next_number)
        if any(self._comm.gather_numbers(int(ties_of(parts) != ties_of(self._base)))):
            since = None
        if since is None:
            self._base = _copied(parts)
        else:
            version = self._publish_delta(parts, since, number)
            self._deltas += 1
        if since is None or self._deltas >= self._anchor_every:
            version = self._publish_whole(number)
            self._deltas = 0
        self._from_first(self._prune)
        self.version = version
        return version

    def _publish_delta(self, parts: Mapping[str, Part], since: Version, number: int) -> Version:
        chunks = self._together(lambda: self._coded(parts, self._base, since, number))
        version = self._write("delta", chunks, since, number)

        def follow() -> None:
            """Let the base follow by what was published, whatever the weights are by now."""
            _, found = found_in_parts(self._base, chunks, since)
            swap_all([one for one in found if not one.chunk.new], self._base)
            kept = {
                name: part
                for name, part in self._base.items()
                if name in parts and parts[name].piece == part.piece
            }
            others = {name: part for name, part in parts.items() if name not in kept}
            self._base = {**kept, **_copied(others)}

        self._together(follow)
        return version

    def _publish_whole(self, number: int) -> Version:
        chunks = self._together(lambda: self._coded(self._base, {}, _NOTHING, number))
        return self._write("anchor", chunks, _NOTHING, number)

    def _coded(
        self, now: Mapping[str, Part], old: Mapping[str, Part], since: Version, number: int
    ) -> list[bytes]:
        shard = (self._comm.rank, self._comm.size)
        return list(encode_parts(now, old, self._code, since, number, shard))

    def _write(self, kind: str, chunks: list[bytes], base: Version, number: int) -> Version:
        """Write this rank's file, and commit the files of all ranks."""
        comm = self._comm
        read = [read_chunk(chunk) for chunk in chunks]
        sums = comm.gather_numbers(signed(sum(chunk.sum for chunk in read)))
        version = base.after(number, sum(sums))
        first = f"{kind}-{base.number:010}-{number:010}-{self._writer}"
        names = tuple(f"{first}.{rank:04}.safetensors" for rank in range(comm.size))
        elements = sum(part.piece.count for part in untied(self._base).values())
        size = self._together(
            lambda: self._store.write(names[comm.rank], delta_file(chunks, base, version))
        )
        entry = Entry(
            kind=kind,
            base=base if kind == "delta" else None,
            version=version,
            names=names,
            bytes=sum(comm.gather_numbers(size)),
            elements=sum(comm.gather_numbers(elements)),
            changed=sum(comm.gather_numbers(sum(chunk.changed for chunk in read))),
            time=time.time(),
        )
        self._from_first(lambda: self._commit(entry))
        return version

    def _next_number(self) -> int:
        """Return the number of the next version; the first time, take the store over."""
        if not self._mine:
            write_index(self._store, read_index(self._store).by(self._writer))
            self._mine = True
        newest = self._index().newest
        return newest.number + 1 if newest else 0

    def _index(self) -> Index:
        """Return the index of the store, which must be this publisher's."""
        index = read_index(self._store)
        if index.writer != self._writer:
            raise VersionError(
                f"another publisher has written to {self._store}; a store has one at a time"
            )
        return index

    def _commit(self, entry: Entry) -> int:
        write_index(self._store, self._index().with_entries(entry))
        return 0

    def _prune(self) -> int:
        """Remove what nobody needs: from the index first."""
        index = self._index()
        kept = index.pruned(self._lag)
        dropped = index.names - kept.names
        if dropped:
            write_index(self._store, kept)
        for name in dropped:
            self._store.remove(name)
        return 0

    def _together(self, work: Callable[[], T]) -> T:
        """Do this rank's work; raise on all ranks if it fails on one."""
        result, error = None, None
        try:
            result = work()
        except Exception as failure:
            error = failure
        failed = self._comm.gather_numbers(int(error is not None))
        if error is not None:
            raise error
        if any(failed):
            raise VersionError(f"rank {failed.index(1)} failed; this version is not published")
        return result  # type: ignore[return-value]  # there is one if nothing failed

    def _from_first(self, work: Callable[[], int]) -> int:
        """Do work on rank 0, and return its number on all ranks."""
        mine = self._together(lambda: work() if self._comm.rank == 0 else 0)
        return self._comm.gather_numbers(mine)[0]


def _owned(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Part]:
    """Return what this rank tells: of what several ranks hold alike, the first one does."""
    mine: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            where = tensor.device_mesh.get_coordinate() or [1] * tensor.device_mesh.ndim
            pairs = zip(where, tensor.placements, strict=True)
            if all(place == 0 for place, how in pairs if how.is_replicate()):
                mine[name] = tensor
        elif rank == 0:
            mine[name] = tensor
    return parts_of(mine)


def _copied(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Copy parts to the host; tied ones stay tied."""
    return {name: Part(parts[name].piece, local) for name, local in copied(parts).items()}
