"""Streams over a communicator, in a format: what collectives are written against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import accumulate
from typing import Concatenate, ParamSpec, TypeVar

from torch import Tensor

from sparcel import formats, patterns
from sparcel.comm import DIRECT_RANKS, Communicator, call_of
from sparcel.errors import FormatError, InputError, MismatchError
from sparcel.formats import COO, Expected, Format
from sparcel.ops import SUM, Op
from sparcel.profiling import timed
from sparcel.stages import Exchange, most_bytes
from sparcel.stream import SparseStream, concatenate, reduce

P = ParamSpec("P")
T = TypeVar("T")

DIRECT_BYTES = 256 << 10
"""Messages of up to so many bytes count as short: see `DIRECT_RANKS`."""


class Wire:
    """A communicator that carries streams.

    Parameters
    ----------
    comm
        What carries the messages.
    format
        How streams are laid out in them; the same on all ranks.

    Attributes
    ----------
    rank, size
        Those of the communicator.
    """

    def __init__(self, comm: Communicator, format: Format = COO) -> None:
        self.comm, self.format = comm, format
        self.rank, self.size = comm.rank, comm.size

    def compact(self, stream: SparseStream, op: Op = SUM) -> SparseStream:
        """Return the stream itself, or a dense one where that takes fewer bytes on the wire."""
        return stream.compact(op, self._dense_at(stream.size, stream))

    @timed("reduce")
    def reduce(self, streams: Sequence[SparseStream], op: Op = SUM) -> SparseStream:
        """Reduce streams in the order given; the result is as `compact` returns it."""
        return reduce(streams, op, self._dense_at(streams[0].size, streams[0]))

    @timed("reduce")
    def concatenate(
        self, streams: Sequence[SparseStream], op: Op = SUM, out: Tensor | None = None
    ) -> SparseStream:
        """Join streams of consecutive index ranges; the result is as `compact` returns it.

        A dense one is written to ``out``, if given.
        """
        size = sum(stream.size for stream in streams)
        return concatenate(streams, op, self._dense_at(size, streams[0]), out)

    def most_bytes(self, expected: Expected) -> int:
        """Return the most bytes of a message that holds what is expected."""
        size, nnz, value_bytes = expected.size, expected.max_nnz, expected.value_bytes
        if expected.stays_sparse:
            return self.format.max_bytes(size if nnz is None else min(nnz, size), size, value_bytes)
        return most_bytes(self.format, nnz, size, value_bytes)

    def exchange(
        self, sends: Mapping[int, SparseStream], receives: Mapping[int, Expected]
    ) -> dict[int, SparseStream]:
        """Send and receive streams, all outstanding at once; return what came, by source.

        Raises
        ------
        MismatchError
            When a stream is not what was expected.
        FormatError
            When a message holds no stream.
        CommunicationError
            See `Communicator.exchange`.
        """
        messages = self.comm.exchange(
            {rank: self.encode(stream) for rank, stream in sends.items()},
            {rank: self.most_bytes(one) for rank, one in receives.items()},
        )
        return {rank: self.decode(rank, m, receives[rank]) for rank, m in messages.items()}

    def exchange_and_reduce(
        self,
        own: SparseStream,
        sends: Mapping[int, SparseStream],
        sources: Sequence[int],
        max_nnz: int | None,
        op: Op = SUM,
    ) -> SparseStream:
        """Send streams, and reduce what comes with this rank's own, in the order of the ranks.

        What comes is like ``own`` and has at most ``max_nnz`` entries. It is not decoded where the
        format can reduce messages.
        """
        message = self.encode(own)
        messages = self.comm.exchange(
            {to: message if s is own else self.encode(s) for to, s in sends.items()},
            dict.fromkeys(sources, self.most_bytes(Expected.like(own, max_nnz))),
        )
        return self._reduce_messages({**messages, self.rank: message}, own, op)

    def gather(self, stream: SparseStream, expected: Sequence[Expected]) -> list[SparseStream]:
        """Give every rank the stream of every rank, by rank; rank r sends ``expected[r]``."""
        return self.gather_messages(self.encode(stream), expected)

    def gather_messages(self, message: Tensor, expected: Sequence[Expected]) -> list[SparseStream]:
        """Do what `gather` does, with this rank's stream already encoded."""
        at_most = max(self.most_bytes(one) for one in expected)
        messages = gather(message, self.comm, at_most)
        return [self.decode(r, m, expected[r]) for r, m in enumerate(messages)]

    def gather_and_reduce(
        self, own: SparseStream, max_nnz: int | None, op: Op = SUM
    ) -> SparseStream:
        """Give every rank the stream of every rank, reduced in the order of the ranks."""
        messages = gather(self.encode(own), self.comm, self.most_bytes(Expected.like(own, max_nnz)))
        return self._reduce_messages(dict(enumerate(messages)), own, op)

    @timed("encode")
    def encode(self, stream: SparseStream) -> Tensor:
        """Return the message that holds ``stream``.

        Raises
        ------
        InputError
            When the format does not hold it exactly.
        """
        message, error = self.format.encode(stream)
        if error is not None:
            raise InputError(
                f"{self.format} loses a part of what it encodes; only collectives that return what"
                " was lost can use it, such as quantized_split_allgather"
            )
        return message

    @timed("decode")
    def decode(self, source: int, message: Tensor, expected: Expected | None) -> SparseStream:
        """Return the stream that rank ``source`` sent, which may be any if ``expected`` is None.

        Errors name both ranks.
        """
        try:
            return formats.decode(message, expected, self.format)
        except MismatchError as error:
            raise MismatchError(
                f"rank {source} sent rank {self.rank} {error}; every rank must call with the same"
                " size, dtype and width"
            ) from None
        except FormatError as error:
            raise FormatError(
                f"rank {source} sent rank {self.rank} a bad message: {error}"
            ) from None

    @timed("reduce")
    def _reduce_messages(
        self, messages: Mapping[int, Tensor], own: SparseStream, op: Op
    ) -> SparseStream:
        """Reduce the streams in messages, by rank; this rank's holds ``own``."""
        ranks = sorted(messages)
        total = self.format.reduce_messages([messages[rank] for rank in ranks], own, op)
        if total is not None:
            return self.compact(total, op)
        like = Expected.like(own)
        return self.reduce(
            [
                own if rank == self.rank else self.decode(rank, messages[rank], like)
                for rank in ranks
            ],
            op,
        )

    def _dense_at(self, size: int, like: SparseStream) -> int:
        return self.format.dense_from(size, like.value_bytes)


def collective(
    function: Callable[Concatenate[SparseStream, Wire, P], T],
) -> Callable[Concatenate[SparseStream, Wire, P], T]:
    """Make ``function(stream, wire, …)`` a call that the ranks compare: see `Communicator.call`.

    The arguments after the wire, its format, and the stream's size, dtype and width must be the
    same on all ranks.
    """

    @wraps(function)
    def call(stream: SparseStream, wire: Wire, /, *args: P.args, **kwargs: P.kwargs) -> T:
        facts = (
            *(("size", stream.size), ("dtype", stream.dtype), ("width", stream.width)),
            ("format", wire.format),
        )
        same = call_of(function, facts, args, tuple(kwargs.items()))
        return wire.comm.call(same, lambda: function(stream, wire, *args, **kwargs))

    return call


def gather(message: Tensor, comm: Communicator, at_most: int) -> list[Tensor]:
    """Give every rank the message of every rank, by rank; ``at_most`` bounds the bytes of each.

    Few ranks send short messages to each other, all at once: see `DIRECT_RANKS`. Otherwise by
    Bruck's pattern, in ⌈log₂P⌉ rounds.
    """
    if _goes_direct(comm.size, at_most):
        return comm.gather(message, at_most)

    def cut(parts: list[Tensor], ranks: Sequence[int]) -> list[Tensor]:
        messages = [message for part in parts for message in formats.decode_all(part)]
        if len(messages) != len(ranks):
            raise FormatError(
                f"rank {ranks[0]} sent rank {comm.rank} {len(messages)} messages in one, where"
                f" {len(ranks)} were expected; every rank must call the same collective"
            )
        return messages

    return comm.gather_in_rounds(message, [at_most] * comm.size, cut)


def gather_traffic(blocks: Sequence[float]) -> list[tuple[float, float]]:
    """Return what each rank sends and receives in `gather`.

    Rank r's message has ``blocks[r]`` bytes, which all ranks know.
    """
    ranks, total = len(blocks), sum(blocks)
    if _goes_direct(ranks, max(blocks)):
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
    """Yield the stages of `gather` for a rank, where rank r's message has ``blocks[r]`` bytes."""
    ranks = len(blocks)
    if ranks == 1:
        return
    if _goes_direct(ranks, at_most):
        others = (*blocks[:rank], *blocks[rank + 1 :])
        yield Exchange("gather", (blocks[rank],) * (ranks - 1), others, inside=inside)
        return
    for _, above, distance, count in patterns.bruck(rank, ranks):
        sent = sum(blocks[(rank + place) % ranks] for place in range(count))
        received = sum(blocks[(above + place) % ranks] for place in range(count))
        yield Exchange("shift", (sent,), (received,), distance, inside)


def _goes_direct(ranks: int, at_most: float) -> bool:
    return ranks <= DIRECT_RANKS and at_most <= DIRECT_BYTES
