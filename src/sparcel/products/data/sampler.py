"""Samplers by which each node reads a part of a set."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from sparcel.core._checks import checked_flag, checked_whole
from sparcel.core.comm import Call, Group, resolve_or_alone
from sparcel.errors import InputError
from sparcel.products.data.cached import Cached

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
