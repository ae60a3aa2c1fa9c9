"""What an algorithm consists of, one stage after the other: exchanges and work, without seconds.

The stages of an algorithm stand in its own file: a function ``stages(problem)`` yields those of one
rank, `Problem.rank`. `sparcel.cost` turns them into seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from sparcel import patterns
from sparcel._checks import checked_whole
from sparcel.comm import DIRECT_RANKS
from sparcel.errors import InputError
from sparcel.fill_in import expected_union
from sparcel.formats import RAW, Format, Lengths

UnionSize: TypeAlias = Callable[[Sequence[int], int, int], float]
"""``(ranks, start, stop)`` -> how many coordinates in ``[start, stop)`` some of the ranks sends."""


@dataclass(frozen=True)
class Problem:
    """A sum over ranks, as far as its cost depends on it.

    Parameters
    ----------
    size, k
        Coordinates of the vector, and how many of them every rank sends.
    ranks, ranks_per_node
        How many ranks there are; consecutive ones share a node.
    itemsize
        Bytes of a coordinate's value, or row of values.
    spread
        Coordinates among which the ranks' indices lie, evenly and independently: the whole vector
        where it is None, ``k`` where all ranks have the same indices.
    format
        How streams travel.
    answer
        How what the owners of regions return travels; None for as what they are sent.
    rank
        Whose stages are meant. Rank 0 has as much to do as any other.
    union
        What the ranks' indices have in common, where it is known; otherwise it is expected by
        ``spread``.
    """

    size: int
    k: int
    ranks: int
    ranks_per_node: int = 1
    itemsize: int = 4
    spread: int | None = None
    format: Format = RAW
    rank: int = 0
    union: UnionSize | None = None
    answer: Format | None = None

    def __post_init__(self) -> None:
        for name in ("size", "k", "ranks", "ranks_per_node", "itemsize"):
            checked_whole(getattr(self, name), name, at_least=1)
        if not self.k <= self.size:
            raise InputError(f"k must be at most the size, {self.size}, got {self.k}")
        if self.spread is not None:
            checked_whole(self.spread, "spread", at_least=self.k, at_most=self.size)

    @property
    def everyone(self) -> Sequence[int]:
        """All ranks."""
        return range(self.ranks)

    @property
    def foreseen(self) -> Problem:
        """The problem as the ranks know it before they exchange anything."""
        return replace(self, spread=None, union=None)

    @property
    def regions(self) -> list[int]:
        """The P+1 boundaries of the regions of equal size."""
        return patterns.regions(self.size, self.ranks)

    def entries(self, ranks: Sequence[int], start: int = 0, stop: int | None = None) -> float:
        """Return how many coordinates in ``[start, stop)`` the sum of these ranks' streams has."""
        stop = self.size if stop is None else stop
        if self.union is not None:
            return self.union(ranks, start, stop)
        return self.expected(len(ranks)) * (stop - start) / self.size

    def expected(self, streams: float) -> float:
        """Return how many coordinates the sum of this many ranks' streams is expected to have."""
        return expected_union(self.spread or self.size, self.k, streams)

    @cached_property
    def lengths(self) -> Lengths:
        """How long messages of parts of the vector are."""
        return Lengths(self.format, self.size, self.itemsize)

    def message(self, nnz: float, size: int | None = None) -> float:
        """See `Lengths.message`."""
        return self.lengths.message(nnz, size)

    def region_message(self, ranks: Sequence[int], start: int, stop: int) -> float:
        """Return the bytes of these ranks' sum in ``[start, stop)``: `Lengths.region_message`."""
        return self.lengths.region_message(self.entries(ranks, start, stop), stop - start)

    def sparse_message(self, nnz: float, size: int | None = None) -> float:
        """See `Lengths.sparse_message`."""
        return self.lengths.sparse_message(nnz, size)

    def most_bytes(self, nnz: float | None, size: int | None = None) -> int:
        """See `Lengths.most_bytes`."""
        return self.lengths.most_bytes(nnz, size)

    def is_dense(self, nnz: float, size: int | None = None) -> bool:
        """See `Lengths.is_dense`."""
        return self.lengths.is_dense(nnz, size)


@dataclass(frozen=True)
class Exchange:
    """Messages that ranks exchange at once.

    Attributes
    ----------
    pattern
        One of `sparcel.rates.TRANSFERS`.
    sends, receives
        Bytes of each message that the rank sends and receives.
    distance
        How many ranks apart the two ends of a message are.
    inside
        Whether all ends are in one node.
    """

    pattern: str
    sends: tuple[float, ...] = ()
    receives: tuple[float, ...] = ()
    distance: int = 1
    inside: bool = False

    @property
    def rounds(self) -> int:
        """Messages on the critical path."""
        return max(len(self.sends), len(self.receives))

    @property
    def nbytes(self) -> float:
        """Bytes of a message, on average, in the direction that has more."""
        return max(sum(self.sends), sum(self.receives)) / self.rounds


@dataclass(frozen=True)
class EngineSum:
    """The engine's dense all-reduce of ``size`` values, counted as the ring that it stands for.

    ``rank`` of ``ranks`` is the one whose messages are meant.
    """

    size: int
    itemsize: int
    rank: int
    ranks: int

    @property
    def nbytes(self) -> int:
        """Bytes of the vector."""
        return self.size * self.itemsize

    @property
    def rounds(self) -> int:
        """Messages on the critical path."""
        return 2 * (self.ranks - 1)

    @property
    def sent(self) -> int:
        """Bytes that the rank sends: all chunks twice, but for two that it sends once."""
        return self.itemsize * (2 * self.size - self._chunk(1) - self._chunk(2))

    @property
    def received(self) -> int:
        """Bytes that the rank receives."""
        return self.itemsize * (2 * self.size - self._chunk(0) - self._chunk(1))

    def _chunk(self, above: int) -> int:
        """Return the values in the chunk of the rank that is so many above this one."""
        cuts, place = patterns.regions(self.size, self.ranks), (self.rank + above) % self.ranks
        return cuts[place + 1] - cuts[place]


@dataclass(frozen=True)
class Work:
    """What ranks compute, each on its own.

    Attributes
    ----------
    kind
        One of `sparcel.rates.WORK`.
    amount
        Of the rank that has most to do, in the unit that `sparcel.cost.work` gives.
    busy
        The share of the ranks that do this at the same time.
    times
        How often this is done, to such an amount.
    """

    kind: str
    amount: float
    busy: float = 1.0
    times: float = 1


def copied(entries: float, busy: float = 1.0, times: float = 1) -> Work:
    """Return the work of decoding, cutting or joining messages and streams of so many entries.

    It is that of encoding two entries of 8 bytes.
    """
    return Work("encode", 16 * entries, busy, times)


def chosen(entries: float, busy: float = 1.0) -> Work:
    """Return the work of taking the largest out of so many entries, which takes 8 passes."""
    return Work("select", 8 * entries, busy)


def scattered(entries: float) -> Work:
    """Return the work of adding entries to a dense vector: twice that of merging as many."""
    return Work("merge", 2 * entries)


Stage: TypeAlias = Exchange | EngineSum | Work

Stages: TypeAlias = Callable[[Problem], Iterable[Stage]]

ROUND_OPERATIONS = 12
"""Small operations of a round, beside the work on its message: `Work` of the kind "small"."""


def merge_two(problem: Problem, one: Sequence[int], other: Sequence[int]) -> Iterator[Stage]:
    """Yield the work of adding two sums, each of some ranks' streams."""
    entries = [problem.entries(ranks) for ranks in (one, other)]
    if any(map(problem.is_dense, entries)):
        yield Work("add", problem.size)
        return
    yield Work("merge", sum(entries))
    yield from made_dense(problem, problem.entries([*one, *other]), problem.size)


def merge_all(problem: Problem, start: int, stop: int) -> Iterator[Stage]:
    """Yield the work of adding all ranks' streams in ``[start, stop)`` at once.

    It takes twice as long as merging as many entries of two streams.
    """
    yield Work("merge", 2 * problem.ranks * problem.entries([problem.rank], start, stop))


def made_dense(problem: Problem, entries: float, size: int) -> Iterator[Stage]:
    """Yield the work of making a sum dense, where it is smaller so."""
    if problem.is_dense(entries, size):
        yield Work("add", size)
        yield scattered(entries)


DIRECT_BYTES = 256 << 10
"""Messages of up to so many bytes count as short: see `goes_direct`."""


def goes_direct(ranks: int, at_most: float) -> bool:
    """Tell whether all ranks send one another messages of so many bytes at once, in one round."""
    return ranks <= DIRECT_RANKS and at_most <= DIRECT_BYTES


def gather_traffic(blocks: Sequence[float]) -> list[tuple[float, float]]:
    """Return what each rank sends and receives in `Wire.gather`.

    Rank r's message has ``blocks[r]`` bytes, which all ranks know.
    """
    ranks, total = len(blocks), sum(blocks)
    if goes_direct(ranks, max(blocks)):
        return [((ranks - 1) * block, total - block) for block in blocks]
    before = list(accumulate([*blocks, *blocks], initial=0.0))
    counts = [count for *_, count in patterns.bruck(0, ranks)]
    return [
        (sum(before[rank + count] - before[rank] for count in counts), total - block)
        for rank, block in enumerate(blocks)
    ]


def gather_stages(
    blocks: Sequence[float], rank: int, at_most: float, inside: bool = False
) -> Iterator[Exchange]:
    """Yield the stages of `Wire.gather` for a rank; rank r's message has ``blocks[r]`` bytes."""
    ranks = len(blocks)
    if ranks == 1:
        return
    if goes_direct(ranks, at_most):
        others = (*blocks[:rank], *blocks[rank + 1 :])
        yield Exchange("gather", (blocks[rank],) * (ranks - 1), others, inside=inside)
        return
    for _, above, distance, count in patterns.bruck(rank, ranks):
        sent = sum(blocks[(rank + place) % ranks] for place in range(count))
        received = sum(blocks[(above + place) % ranks] for place in range(count))
        yield Exchange("shift", (sent,), (received,), distance, inside)
