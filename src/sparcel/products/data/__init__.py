"""Reading samples once: a cache on the node's disk and in its memory, and samplers for it."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Sampler

from sparcel.core import units
from sparcel.core._checks import check_callable, check_type, checked_flag, checked_whole
from sparcel.core.comm import Call, Group, resolve_or_alone
from sparcel.errors import InputError, warn
from sparcel.products.data.disk import Disk, UnusableError
from sparcel.products.data.records import Source, pack, unpack
from sparcel.products.data.shared import Shared, check_memory, shared_by_node

__all__ = ["CacheStats", "Cached", "PartSampler"]

NOT_READ, NOT_WRITTEN, TORN, NO_MEMORY, NOT_FREED = range(5)
"""What is said once, by whichever process comes upon it first."""


@dataclass(frozen=True)
class CacheStats:
    """What a `Cached` did so far, in all processes that share its memory.

    Attributes
    ----------
    from_memory, from_disk, from_source
        Samples by where they were found.
    in_memory
        Samples that are in memory now.
    memory_bytes
        Bytes of memory that they take, with their index.
    disk_bytes
        Bytes of the copy on the disk, 0 without one.
    """

    from_memory: int
    from_disk: int
    from_source: int
    in_memory: int
    memory_bytes: int
    disk_bytes: int


class Cached(Dataset[Any]):
    """A map-style dataset that reads each sample of another one once.

    A sample passes three stages. ``dataset[i]`` is kept on disk, in ``folder``, for this run and
    later ones. ``decode(sample)`` is kept in memory, for this run's processes on this node: the
    loader's workers, forked or spawned, and with ``group`` the node's ranks. ``transform(decoded)``
    is computed at each access. What is returned belongs to the caller, who may change it.

    A cache that fails does not stop a training. Where samples cannot be kept, because the disk is
    full or the folder read-only, a `SparcelWarning` says so once, and they are read from the
    source. Memory that is full keeps what it has.

    Parameters
    ----------
    dataset
        Any dataset with ``len(dataset)`` and ``dataset[i]``, whose samples can be pickled and are
        the same at each access. It should do what is slow and give what is small: the bytes of an
        image file and a label, say.
    folder
        A folder on a disk of this node, for this dataset alone, which is made if need be. None
        keeps nothing on disk. A copy belongs to the dataset's class and length, to its indices if
        it has any, as a `torch.utils.data.Subset` does, to those of the datasets in it, and to
        ``version``.
    memory
        Bytes of memory that this node may spend: a number, or a text such as ``"4 GiB"``. With 0
        nothing is kept there.
    decode
        What to do with a sample once, such as decoding and normalising an image; it must give the
        same at each call.
    transform
        What to do at each access, such as random augmentation.
    version
        Any text. A copy on disk of another version is made anew.
    threads
        How many samples of a batch are read from the source at once. More than 1 hide the latency
        of a slow store, and need a ``dataset`` that threads may use together.
    looks
        How many samples on disk, chosen at random, are compared with those of the source at first.
        If one differs, the copy on disk is made anew. Errors of the source pass through.
    group
        The ranks, which make the object together; those on one node share the memory. None for
        torch's default process group, and where there is none, for a process that was launched
        alone.

    Raises
    ------
    InputError
        When an argument is wrong; later, when a sample cannot be pickled.
    MismatchError
        When ranks of ``group`` give other datasets, another ``version`` or another ``memory``.

    Notes
    -----
    Source: the DataCache of CommLib (Shi et al. 2021, section 4.1).
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        folder: str | os.PathLike[str] | None,
        *,
        memory: int | str,
        decode: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        version: str = "",
        threads: int = 1,
        looks: int = 4,
        group: Group = None,
    ) -> None:
        given = units.nbytes(memory) if isinstance(memory, str) else memory
        limit = checked_whole(given, "memory", at_least=0, at_most=1 << 62)
        for name, function in (("decode", decode), ("transform", transform)):
            if function is not None:
                check_callable(function, name)
        check_type(version, str, "version")
        looks = checked_whole(looks, "looks", at_least=0)
        self._source = Source(dataset, checked_whole(threads, "threads", at_least=1))
        self._decode, self._transform = decode, transform
        check_memory(len(self), limit)  # here, where a wrong one does not close the group
        comm = resolve_or_alone(group)
        identity = self._source.identity(version)
        self._disk = None if folder is None else self._opened(folder, identity, looks)
        if comm is None:
            self._shared = Shared(len(self), limit)
        else:
            self._shared = shared_by_node(comm, len(self), limit, identity)

    def __len__(self) -> int:
        return self._source.length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch; torch's DataLoader calls this."""
        places = [self._place(index) for index in indices]
        if len(set(places)) < len(places):  # each occurrence is an object of its own
            return [self[place] for place in places]
        found = self._found(places)
        decoded = [found[place] for place in places]
        return decoded if self._transform is None else [*map(self._transform, decoded)]

    def stats(self) -> CacheStats:
        """Return what was read so far, and what is kept."""
        disk = 0 if self._disk is None else self._disk.used
        return CacheStats(*self._shared.counts(), self._shared.kept(), self._shared.used, disk)

    def hold(self, part: npt.NDArray[np.int64] | None) -> None:
        """Keep samples of a part alone in memory from now on, and free the memory of all others.

        `PartSampler` calls this. All ranks of the node may do so, each when it comes to that part:
        only the first call changes something. With None all samples may be kept again, as a sampler
        of the whole set needs it after a `PartSampler`; nothing is freed.
        """
        if not self._shared.hold(part):
            self._say_once(
                NOT_FREED,
                "this system does not free a part of the memory; samples of other parts stay in it",
            )

    def _place(self, index: int) -> int:
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"index {place} is out of range for {len(self)} samples")
        return place % len(self)

    def _found(self, places: Sequence[int]) -> dict[int, Any]:
        """Return decoded samples by place, from wherever they are."""
        records = {place: self._shared.get(place) for place in places}
        decoded = {place: unpack(record) for place, record in records.items() if record is not None}
        in_memory = len(decoded)
        missing = [place for place in places if place not in decoded]
        samples = self._from_disk(missing)
        on_disk = len(samples)
        samples |= self._from_source([place for place in missing if place not in samples])
        self._shared.count(in_memory, on_disk, len(samples) - on_disk)
        for place, sample in samples.items():
            decoded[place] = sample if self._decode is None else self._decode(sample)
            if self._shared.wants(place):
                had_memory = self._shared.put(place, pack(place, decoded[place]))
                if not had_memory:
                    self._say_once(
                        NO_MEMORY,
                        "the system has no memory left; no more samples are kept in memory",
                    )
        return decoded

    def _from_disk(self, places: Sequence[int]) -> dict[int, Any]:
        if not places or self._disk is None:
            return {}
        try:
            records = self._disk.get(places)
        except UnusableError as error:
            self._disk = None
            self._say_once(NOT_READ, f"{error}; samples are read from the source")
            return {}
        samples, torn = {}, []
        for place, record in records.items():
            try:
                samples[place] = unpack(record)
            except Exception:  # it is torn, or a pickle whose class is gone, say
                torn.append(place)
        if torn:
            self._disk.drop(torn)
            self._say_once(TORN, f"sample {torn[0]} was torn on disk; such samples are read anew")
        return samples

    def _from_source(self, places: Sequence[int]) -> dict[int, Any]:
        """Return samples by place, and keep them on disk."""
        if not places:
            return {}
        samples = dict(zip(places, self._source.read(places), strict=True))
        if self._disk is not None and not self._disk.read_only:
            try:
                self._disk.put({place: pack(place, one) for place, one in samples.items()})
            except UnusableError as error:
                self._disk.read_only = True
                self._say_once(NOT_WRITTEN, f"samples are no longer kept on disk: {error}")
        return samples

    def _say_once(self, number: int, message: str) -> None:
        if self._shared.first_to_say(number):
            warn(message)

    def _opened(self, folder: str | os.PathLike[str], identity: str, looks: int) -> Disk | None:
        """Return the copy on disk; warn and return None if there cannot be one."""
        if not isinstance(folder, str | os.PathLike):
            raise InputError(
                f"folder must be the path of a folder, or None, got {type(folder).__name__}"
            )
        path = os.path.abspath(folder)  # a process may change its folder
        if os.path.exists(path) and not os.path.isdir(path):
            raise InputError(f"folder must be a folder, and {path} is a file")
        disk = Disk(Path(path), identity, len(self))
        try:
            disk.open(self._source.still_has, looks)
        except UnusableError as error:
            warn(f"samples are not kept on disk: {error}")
            return None
        return disk


_PARTS, _ORDER = range(2)
"""What random numbers are for."""


class PartSampler(Sampler[int]):
    """Gives each node a part of a set, through which its ranks go together.

    A node then needs memory for its part alone. Parts are drawn at random, in proportion to the
    nodes' numbers of ranks. In each epoch a node's ranks go through its part in a new order, and
    each reads its share. So all ranks read equally many samples, and all together read each sample
    once, up to the remainder of the division by the number of ranks.

    Everything follows from ``seed`` and the epoch, so a training resumes with `set_epoch` alone.
    Use it as a `torch.utils.data.DistributedSampler`: call ``set_epoch`` before each epoch.

    Parameters
    ----------
    dataset
        The set, or its length. If it is a `Cached`, memory of samples that are no longer in the
        node's part is freed; what is on disk stays there.
    group
        The ranks, which make the sampler together, as those of `Cached`.
    exchange_every
        The number of epochs after which parts are drawn anew. None keeps the same parts for ever.
    shuffle
        False cuts the set in runs of consecutive samples, which are read in order.
    seed
        The seed of all random draws, equal on all ranks.
    drop_last
        Whether to leave out the samples that remain when all ranks have equally many. Otherwise
        some ranks read a sample of their part twice, so that none has fewer.

    Raises
    ------
    InputError
        When an argument is wrong, or the set has fewer samples than there are ranks.
    MismatchError
        When ranks give other arguments.
    """

    def __init__(
        self,
        dataset: Sized | int,
        group: Group = None,
        *,
        exchange_every: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if isinstance(dataset, Sized):
            self._length = len(dataset)
        else:
            hint = "it is a set, which has a length, or that length"
            self._length = checked_whole(dataset, "dataset", at_least=1, hint=hint)
        self._cached = dataset if isinstance(dataset, Cached) else None
        if exchange_every is not None:
            checked_whole(exchange_every, "exchange_every", at_least=1)
        self._exchange_every = exchange_every
        self._shuffle = checked_flag(shuffle, "shuffle")
        self._seed = checked_whole(seed, "seed", at_least=0)
        self._drop_last = checked_flag(drop_last, "drop_last")
        if exchange_every is not None and not shuffle:
            raise InputError("exchange_every draws parts at random, which shuffle=False excludes")
        self._nodes, self._rank = self._ranks(group)
        self._epoch = 0
        ranks = len(self._nodes)
        if self._length < ranks:
            raise InputError(f"{ranks} ranks cannot share a set of {self._length} samples")
        self._share = self._length // ranks if drop_last else -(-self._length // ranks)

    def _ranks(self, group: Group) -> tuple[list[int], int]:
        """Return the node of each rank, and this rank."""
        comm = resolve_or_alone(group)
        if comm is None:
            return [0], 0
        settings = ("length", "exchange_every", "shuffle", "seed", "drop_last")
        call = Call.of("part_sampler", {name: getattr(self, f"_{name}") for name in settings})

        def nodes() -> list[int]:
            comm.gather_numbers(0)  # a message, which carries the call
            return comm.nodes()

        return comm.call(call, nodes), comm.rank

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is next, from 0 on; all ranks call before each epoch."""
        self._epoch = checked_whole(epoch, "epoch", at_least=0)

    def __len__(self) -> int:
        return self._share

    def __iter__(self) -> Iterator[int]:
        node = self._nodes[self._rank]
        part = self.part()
        if self._cached is not None:
            self._cached.hold(None if self._exchange_every is None else part)
        order = part
        if self._shuffle:
            order = self._random(_ORDER, self._epoch, node).permutation(part)
        sharing = self._nodes.count(node)
        order = np.resize(order, sharing * self._share)  # repeats the first, or leaves the last out
        yield from order[self._nodes[: self._rank].count(node) :: sharing].tolist()

    def part(self) -> npt.NDArray[np.int64]:
        """Return the samples of this rank's node in the epoch that is next."""
        ranks, node = len(self._nodes), self._nodes[self._rank]
        before = sum(other < node for other in self._nodes)
        ends = (before, before + self._nodes.count(node))
        start, stop = (self._length * count // ranks for count in ends)
        if not self._shuffle:
            return np.arange(start, stop)
        drawn = 0 if self._exchange_every is None else self._epoch // self._exchange_every
        return self._random(_PARTS, drawn).permutation(self._length)[start:stop]

    def _random(self, *what: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, *what))
