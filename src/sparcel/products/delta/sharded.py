"""Versions from a trainer of several processes, and chunks from one of them to the others."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparcel.core import api
from sparcel.core.comm import ALL_CONTROL, Communicator, Group, Job, resolve
from sparcel.core.stream import SparseStream
from sparcel.errors import InputError, MismatchError, shown
from sparcel.products.delta.base import Cast, copied, followed
from sparcel.products.delta.chunk import NOTHING, Chunk, Version, read_chunk
from sparcel.products.delta.elements import Piece, key_of, signed
from sparcel.products.delta.files import NOTHING_TO_PUBLISH
from sparcel.products.delta.parts import Part, Weights, owners, ties_of
from sparcel.products.delta.publisher import Coded, PublisherBase
from sparcel.products.stores import Store


class ShardedPublisher(PublisherBase):
    """Publishes versions of a model whose tensors are cut over ranks, as by FSDP2; all ranks call.

    Each rank compares, codes and writes what it holds: its shards of DTensors, and the first rank
    that holds a shard or a plain tensor those that several hold alike. So meshes may be anything:
    of some dimensions only, or of some ranks. Ranks may hold other tensors, as with pipeline and
    expert parallelism, or none. Rank 0 commits a version when all ranks have written
    theirs, so it is there from all of them, or not at all. Subscribers see one version of whole
    tensors.

    The first version is a whole model, also where the store has some already, and so is the next
    one after an error.

    Parameters
    ----------
    store
        A place that all ranks reach: as for `Publisher`.
    group
        The ranks, which hold all elements of each tensor together: as for `sparcel.all_reduce`.
    code, anchor_every, lag, apart
        As for `Publisher`.
    cast
        As for `Publisher`. Of a DTensor it gets that, and returns DTensors with the same shards of
        what it makes.

    Attributes
    ----------
    version
        The last version that it has published, or None.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        group: Group = None,
        *,
        code: str = "exponents",
        anchor_every: int = 50,
        lag: int = 20,
        cast: Cast | None = None,
        apart: bool = False,
    ) -> None:
        self._group = resolve(group)
        super().__init__(store, code, anchor_every, lag, cast, apart, self._group)
        self._held: dict[str, Held] = {}
        self._mine: set[str] = set()
        self._deltas = 0

    def publish(self, weights: Weights) -> Version:
        """Publish weights, and return their version when it is durable, on all ranks.

        If a rank fails, it raises its own error, and the others a `VersionError` that names it. All
        of these say whether the version is published all the same, because what failed came after
        its commit; so does `version`.

        Raises
        ------
        InputError
            As `Publisher.publish`; or if the ranks do not hold each element of a tensor, or cut it
            in several ways.
        MismatchError
            If ranks publish tensors of the same name, and of other dtypes, shapes, placements or
            ties. The version is then absent.
        VersionError
            If another rank failed, or another publisher has written to the store, or its index is
            lost.
        """
        since, self._based = self._based, None  # until all is done
        self._outcome = "this version is not published"
        parts = self._owned(*self._together(lambda: self._checked(weights)))
        number = self._numbers(self._on_first(self._index_writer.begin) or 0)[0]
        other = self._is_recut(parts) or ties_of(parts) != ties_of(self._base)
        if any(self._numbers(int(other))):
            since = None
        if since is None:
            self._base = self._together(lambda: copied(parts))
        else:
            coded = self._coded(parts, self._base, since, number)
            version = self._commit_chunks(coded, parts)
            self._base = self._together(lambda: followed(self._base, parts, coded.told))
            self._deltas += 1
        if since is None or self._deltas >= self._anchor_every:
            version = self._publish_whole(number)
            self._deltas = 0
        self._on_first(self._index_writer.prune)
        self._based = version
        return version

    def _publish_whole(self, number: int) -> Version:
        """Publish the base, coded twice, to be told and to be written: it may not fit in memory."""

        def chunks() -> Iterable[bytes]:
            return self._chunks(self._base, {}, NOTHING, number)

        def told() -> list[tuple[Chunk, int]]:
            return [(replace(read_chunk(one), streams=b""), len(one)) for one in chunks()]

        read, sizes = zip(*self._together(told), strict=True)
        version = self._made(read, NOTHING, number)
        return self._commit_chunks(Coded(None, version, read, sizes, chunks()), self._base)

    def publish_gathered(self, weights: Iterable[tuple[str, Tensor]]) -> Version:
        """Publish tensors that all ranks see whole, one after the other, as where each is gathered.

        Each rank copies a share of them to its host, and publishes these: about as many bytes as
        the others. All are asked for on each rank, even if a copy fails there.

        Raises
        ------
        MismatchError
            If ranks see other tensors, or in another order.
        InputError, VersionError
            As from `publish`; or if a name comes twice.
        """
        self._outcome = "this version is not published"
        mine, key = self._together(lambda: self._share_of(weights))
        if len(set(self._numbers(key))) > 1:
            raise MismatchError("ranks see different tensors, or in another order")
        return self.publish(mine)

    def _share_of(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], int]:
        """Return this rank's share, and a number that tells all tensors in their order."""
        mine, seen = dict[str, Tensor](), set[str]()
        sizes, key, coming = [0] * self._ranks, 0, iter(weights)
        try:
            for name, tensor in coming:
                if name in seen:
                    raise InputError(f"'{shown(name)}' comes twice")
                seen.add(name)
                rank = sizes.index(min(sizes))
                sizes[rank] += tensor.nbytes
                key = key_of(f"{key} {name}", tensor.dtype, tensor.shape)
                if rank == self._rank:
                    mine[name] = tensor.detach().to("cpu", copy=True)
        finally:
            deque(coming, maxlen=0)  # other ranks gather with this one
        return mine, signed(key)

    def _checked(self, weights: Weights) -> tuple[dict[str, Part], dict[str, Held]]:
        """Return the parts that this rank holds, and what it tells others of them."""
        tensors, parts = self._served(weights)
        owner = owners(parts)
        held = {}
        for name, part in parts.items():
            placed = getattr(tensors[name], "placements", None)
            told = repr((name, placed, owner[name]))
            held[name] = Held(part.piece, key_of(told, part.piece.dtype, part.piece.shape))
        return parts, held

    def _owned(self, parts: Mapping[str, Part], held: dict[str, Held]) -> Mapping[str, Part]:
        """Return what this rank publishes; all ranks compare what they hold if that has changed."""
        if any(self._numbers(int(held != self._held))):
            everywhere = gathered(held, self._group)
            self._mine = self._together(lambda: owned(held, everywhere, self._rank))
            self._held = held
        return {name: part for name, part in parts.items() if name in self._mine}

    def _is_recut(self, parts: Mapping[str, Part]) -> bool:
        """Tell whether other ranks publish now what this one has published of the same tensors."""
        there = {one.piece.key for one in self._held.values()}
        told = {part.piece for part in parts.values()}
        pieces = [part.piece for part in self._base.values()]
        return any(piece.key in there and piece not in told for piece in pieces)


@dataclass(frozen=True)
class Held:
    """What a rank holds of a tensor, and what all ranks that hold some of it must know alike."""

    piece: Piece
    kind: int

    def row(self) -> tuple[int, ...]:
        """Return it as numbers of 64 bits: the name, the kind, and the elements."""
        one = self.piece
        name = key_of(one.name, torch.uint8, ())
        elements = (one.first, one.row, one.stride, one.count) if one.count else (0,) * 4
        return signed(name), signed(self.kind), *elements


def gathered(held: Mapping[str, Held], comm: Communicator) -> list[Tensor]:
    """Return what each rank holds, as rows of numbers, by rank; all ranks call."""
    mine = torch.tensor([one.row() for one in held.values()], dtype=torch.int64).view(-1, 6)
    counts = comm.gather_numbers(len(mine))
    sizes = [count * mine.itemsize * mine.shape[1] for count in counts]
    octets = mine.view(torch.uint8).flatten()
    rows = comm.gather_blocks(octets, sizes, ALL_CONTROL).view(torch.int64).view(-1, 6)
    return list(rows.split(counts))


def owned(held: Mapping[str, Held], everywhere: Sequence[Tensor], rank: int) -> set[str]:
    """Return the names of the tensors whose elements a rank publishes, as far as it holds them.

    Of ranks that hold the same elements, the first one publishes them.

    Parameters
    ----------
    held
        What this rank holds of each tensor.
    everywhere
        What each rank holds, as `gathered`.
    rank
        This one.

    Raises
    ------
    InputError
        If no rank has a tensor, or ranks together do not hold each element of each tensor in one
        piece.
    MismatchError
        If ranks hold different tensors of the same name.
    """
    if not any(map(len, everywhere)):
        raise InputError(NOTHING_TO_PUBLISH)
    there: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for holder, rows in enumerate(everywhere):
        for name, *rest in rows.tolist():
            there[name].append((holder, *rest))
    mine = set()
    for name, one in held.items():
        own = one.row()
        alike = there[own[0]]
        if any(kind != own[1] for _, kind, *_ in alike):
            raise MismatchError(
                f"ranks publish different tensors as {shown(name)}; dtype, shape, placement and"
                " ties must be the same on all that have it"
            )
        first: dict[tuple[int, ...], int] = {}
        for holder, _, *elements in alike:
            first.setdefault(tuple(elements), holder)
        piece = one.piece
        different = [replace(piece, first=a, row=b, stride=c, count=n) for a, b, c, n in first if n]
        if not piece.made_of(different):
            raise InputError(
                f"{shown(name)} has {piece.size} elements, and the ranks of this group hold"
                f" {sum(one.count for one in different)} in different pieces, with gaps or some"
                " twice; pass a group with all ranks that share it, which cut it in one way"
            )
        if rank in first.values() and (piece.count or not piece.size):
            mine.add(name)
    return mine


class Arriving:
    """Chunks on their way: they travel in the background until somebody waits for them."""

    def __init__(self, job: Job[SparseStream], error: Exception | None = None) -> None:
        self._job, self._error = job, error

    def wait(self) -> list[bytes]:
        """Return the chunks when all are there; raise what `broadcast` raises."""
        values = self._job.wait().values
        if self._error is not None:
            raise self._error
        return _split(values)


@overload
def broadcast(
    chunks: Iterable[bytes] | None,
    group: Group = ...,
    root: int = ...,
    async_op: Literal[False] = ...,
) -> list[bytes]: ...


@overload
def broadcast(
    chunks: Iterable[bytes] | None, group: Group = ..., root: int = ..., *, async_op: Literal[True]
) -> Arriving: ...


def broadcast(
    chunks: Iterable[bytes] | None, group: Group = None, root: int = 0, async_op: bool = False
) -> list[bytes] | Arriving:
    """Return the root's chunks on every rank; the other ranks pass None.

    Few bytes go down a tree; more are scattered, and gathered from all ranks, so that the root
    sends them about twice, however many ranks there are.

    Parameters
    ----------
    chunks
        What `encode` made, on the root.
    group
        As for `sparcel.broadcast`.
    root
        The rank that has the chunks.
    async_op
        Return at once with an `Arriving`; servers go on with the old version until they wait.

    Raises
    ------
    InputError
        If the root has no chunks to send; the root raises its own error, if making them failed.
        The group can be used after that.
    InputError, MismatchError, CommunicationError
        As `sparcel.broadcast`.
    """
    comm = resolve(group)
    stream, error = None, None
    if comm.rank == root:
        try:
            stream = _joined(chunks)
        except Exception as failure:  # the others must know, and would wait
            stream, error = _words(np.array([-1])), failure
    arriving = Arriving(api.broadcast(stream, root, comm, async_op=True), error)
    return arriving if async_op else arriving.wait()


def _joined(chunks: Iterable[bytes] | None) -> SparseStream:
    """Return chunks as words: how many there are, the length of each, and their bytes."""
    if chunks is None:
        raise InputError("the root must pass chunks, got None")
    chunks = list(chunks)
    lengths = np.array([len(chunks), *map(len, chunks)], np.int64)
    data = b"".join([lengths.tobytes(), *chunks])
    return _words(np.frombuffer(data + bytes(-len(data) % 8), np.int64).copy())


def _words(words: NDArray[np.int64]) -> SparseStream:
    return SparseStream(None, torch.from_numpy(words), len(words))


def _split(words: Tensor) -> list[bytes]:
    numbers = words.cpu().numpy()
    count = int(numbers[0])
    if count < 0:
        raise InputError("the root has no chunks to send; its own error says why")
    data = numbers[1 + count :].data.cast("B")
    ends = np.cumsum(numbers[1 : 1 + count]).tolist()
    return [bytes(data[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
