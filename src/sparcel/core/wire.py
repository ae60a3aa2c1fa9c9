"""Streams over a communicator, in a format: what collectives are written against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from sparcel.core import formats
from sparcel.core._checks import check_type
from sparcel.core.comm import DIRECT_RANKS, Communicator, call_of, gather_in_rounds
from sparcel.core.formats import (
    HEADER_BYTES,
    RAW,
    Expected,
    Format,
    Lengths,
    Message,
    Packet,
    merge_messages,
)
from sparcel.core.ops import SUM, Op
from sparcel.core.profiling import timed
from sparcel.core.stream import SparseStream, concatenate, reduce, value_bytes
from sparcel.errors import FormatError, MismatchError

P = ParamSpec("P")
T = TypeVar("T")

DIRECT_BYTES = 256 << 10
"""Messages of up to so many bytes count as short: see `goes_direct`."""


def goes_direct(ranks: int, at_most: float) -> bool:
    """Tell whether all ranks send one another messages of so many bytes at once, in one round."""
    return ranks <= DIRECT_RANKS and at_most <= DIRECT_BYTES


class Lost(NamedTuple):
    """What rounding took: a stream of consecutive coordinates, the first of which is ``start``."""

    start: int
    stream: SparseStream


class Wire:
    """A communicator that carries streams, as packets in a format.

    A format may round what it packs. Every rank then goes on with the stream that a packet holds,
    the same everywhere, and what rounding took is lost to one rank, which `take_lost` tells.

    Parameters
    ----------
    comm
        What carries the messages.
    format
        How streams are laid out in them; the same on all ranks.
    step
        Decides random rounding, together with the format's seed; the same on all ranks.
    control
        How many bytes of a packet are control, which a receiver gets on its host: the header's, or
        `ALL_CONTROL` where the streams are on the host.

    Attributes
    ----------
    rank, size
        Those of the communicator.
    """

    def __init__(
        self,
        comm: Communicator,
        format: Format = RAW,
        step: int = 0,
        control: int = HEADER_BYTES,
    ) -> None:
        self.comm, self.format, self.step, self.control = comm, format, step, control
        self.rank, self.size = comm.rank, comm.size
        self._lost: list[Lost] = []
        self._packets = 0

    @property
    def exact(self) -> Wire:
        """A wire that loses nothing, over the same communicator and with the same index code."""
        return Wire(self.comm, self.format.exact, control=self.control)

    def compact(self, stream: SparseStream, op: Op = SUM) -> SparseStream:
        """Return the stream itself, or a dense one where that takes fewer bytes on the wire."""
        return stream.compact(op, self.format.dense_from(stream.size, stream.value_bytes))

    @timed("reduce")
    def reduce(self, streams: Sequence[SparseStream], op: Op = SUM) -> SparseStream:
        """Reduce streams in the order given.

        The result stores what some stream stores, also where it is a region of a larger sum: it is
        dense only if that is everything. Whoever has a whole sum applies `compact`.
        """
        return reduce(streams, op, max(1, streams[0].size))

    @timed("reduce")
    def concatenate(
        self, streams: Sequence[SparseStream], op: Op = SUM, out: Tensor | None = None
    ) -> SparseStream:
        """Join streams of consecutive index ranges; the result is as `compact` returns it.

        A dense one is written to ``out``, if given.
        """
        size = sum(stream.size for stream in streams)
        dense_at = self.format.dense_from(size, streams[0].value_bytes)
        return concatenate(streams, op, dense_at, out)

    def most_bytes(self, expected: Expected) -> int:
        """Return the most bytes of a message that holds what is expected."""
        size, nnz = expected.size, expected.max_nnz
        lengths = Lengths(self.format, size, value_bytes(expected.dtype, expected.width))
        if expected.stays_sparse:
            return lengths.sparse_message(size if nnz is None else min(nnz, size))
        return lengths.most_bytes(nnz)

    def pack_region(self, stream: SparseStream, start: int = 0) -> Packet:
        """Return the packet of a region of a sum, which stores what the region stores.

        A dense message would store everything. See `Format.for_region` and `pack`.
        """
        format = self.format.for_region(stream.nnz, stream.size, stream.value_bytes)
        if format is None:
            stream, format = stream.compact(SUM, dense_at=0), self.format
        return self._packed(stream, start, self.rank, format)

    def pack(self, stream: SparseStream, start: int = 0, holder: int | None = None) -> Packet:
        """Return the packet of a stream, to send; who goes on with a sum takes the packet's.

        Parameters
        ----------
        start
            The place of the stream's first coordinate in the whole vector.
        holder
            The rank to which rounding loses, where several ranks pack the same stream; they round
            alike. None: this rank.

        Raises
        ------
        InputError
            When the format cannot hold the stream's rows or integers.
        """
        return self._packed(stream, start, self.rank if holder is None else holder, self.format)

    @timed("encode")
    def _packed(self, stream: SparseStream, start: int, owner: int, format: Format) -> Packet:
        # Python hashes whole numbers alike everywhere.
        packet = format.encode(stream, hash((format.seed, self.step, owner, self._packets)))
        self._packets += 1
        held = packet.stream
        if held is not stream and owner == self.rank:
            lost = stream.values - held.values
            self._lost.append(
                Lost(start, SparseStream.unchecked(held.indices, lost, held.size, held.finite))
            )
        return packet

    def take_lost(self) -> list[Lost]:
        """Return what rounding took from this rank since the last call.

        The result of a sum plus what all ranks lost is the sum of their streams. Nothing is lost of
        a stream that is known not to be finite; one on a device may not be.
        """
        lost, self._lost = self._lost, []
        return [one for one in lost if one.stream.finite is not False]

    def exchange(
        self, sends: Mapping[int, Packet], receives: Mapping[int, Expected]
    ) -> dict[int, Packet]:
        """Send and receive packets, all outstanding at once; return what came, by source.

        Raises
        ------
        MismatchError
            When a stream is not what was expected.
        FormatError
            When a message holds no stream.
        CommunicationError
            See `Communicator.exchange`.
        """
        messages = self.comm.exchange_parts(
            {rank: packet.message for rank, packet in sends.items()},
            {rank: self.most_bytes(one) for rank, one in receives.items()},
            self.control,
        )
        return {rank: self._read(rank, m, receives[rank]) for rank, m in messages.items()}

    def exchange_lists(
        self, peer: int, sends: Sequence[Packet], receives: Sequence[Expected]
    ) -> list[Packet]:
        """Send ``peer`` packets in one message, and receive as many; either list may be empty.

        Raises as `exchange`.
        """
        count = len(sends) or len(receives)
        leaving = {peer: formats.joined([packet.message for packet in sends])} if sends else {}
        coming = {peer: sum(map(self.most_bytes, receives))} if receives else {}
        arrived = self.comm.exchange_parts(leaving, coming, count * self.control)
        if not receives:
            return []
        messages = _cut(arrived[peer], count, peer, self.rank)
        return [self._read(peer, *one) for one in zip(messages, receives, strict=True)]

    def exchange_and_reduce(
        self,
        own: SparseStream,
        sends: Mapping[int, Packet],
        sources: Sequence[int],
        max_nnz: int | None,
        op: Op = SUM,
    ) -> SparseStream:
        """Send packets, and `reduce` what comes with this rank's own stream, in the ranks' order.

        What comes is like ``own`` and has at most ``max_nnz`` entries. It is not decoded where
        messages can be reduced as they are.
        """
        messages = self.comm.exchange_parts(
            {rank: packet.message for rank, packet in sends.items()},
            dict.fromkeys(sources, self.most_bytes(Expected.like(own, max_nnz))),
            self.control,
        )
        packed = [packet for packet in sends.values() if packet.stream is own]
        return self._reduce_messages(messages, own, packed[0] if packed else None, op)

    def gather(self, own: Packet, expected: Sequence[Expected]) -> list[SparseStream]:
        """Give every rank the stream of every rank, by rank; rank r sends ``expected[r]``."""
        messages = self.gather_messages(own.message, max(map(self.most_bytes, expected)))
        return [
            own.stream if rank == self.rank else self.decode(rank, message, expected[rank])
            for rank, message in enumerate(messages)
        ]

    def gather_and_reduce(
        self, own: SparseStream, max_nnz: int | None, op: Op = SUM
    ) -> SparseStream:
        """Give every rank the stream of every rank, and `reduce` them in the ranks' order."""
        packet = self.pack(own)
        at_most = self.most_bytes(Expected.like(own, max_nnz))
        messages = dict(enumerate(self.gather_messages(packet.message, at_most)))
        del messages[self.rank]
        return self._reduce_messages(messages, packet.stream, packet, op)

    def gather_messages(self, message: Message, at_most: int) -> list[Message]:
        """Give every rank the message of every rank, by rank; ``at_most`` bounds the bytes of each.

        Few ranks send short messages to each other, all at once: see `goes_direct`. Otherwise by
        Bruck's pattern, in ⌈log₂P⌉ rounds.
        """
        if goes_direct(self.size, at_most):
            return self.comm.gather_parts(message, at_most, self.control)

        def cut(parts: Sequence[Tensor], ranks: Sequence[int]) -> list[Message]:
            return _cut(parts, len(ranks), ranks[0], self.rank)

        bounds = [at_most] * self.size
        return gather_in_rounds(self.comm, message, bounds, formats.joined, cut, self.control)

    @timed("decode")
    def decode(self, source: int, message: Message, expected: Expected | None) -> SparseStream:
        """Return the stream that rank ``source`` sent, which may be any if ``expected`` is None.

        Errors name both ranks.
        """
        try:
            return formats.decode(message, expected)
        except MismatchError as error:
            raise MismatchError(
                f"rank {source} sent rank {self.rank} {error}; every rank must call with the same"
                " size, dtype and width"
            ) from None
        except FormatError as error:
            raise FormatError(
                f"rank {source} sent rank {self.rank} a bad message: {error}"
            ) from None

    def _read(self, source: int, message: Message, expected: Expected) -> Packet:
        return Packet(message, self.decode(source, message, expected))

    @timed("reduce")
    def _reduce_messages(
        self, messages: Mapping[int, Message], own: SparseStream, packet: Packet | None, op: Op
    ) -> SparseStream:
        """`reduce` the other ranks' streams, in messages, with ``own``, by rank.

        ``packet`` holds ``own``, if it was packed.
        """
        ranks = sorted({*messages, self.rank})
        if self.format == RAW:
            packet = packet or self.format.encode(own)
            every = {**messages, self.rank: packet.message}
            total = merge_messages([every[rank] for rank in ranks], own, op)
            if total is not None:
                return total.compact(op, max(1, own.size))
        like = Expected.like(own)
        streams = [
            own if rank == self.rank else self.decode(rank, messages[rank], like) for rank in ranks
        ]
        return self.reduce(streams, op)


def collective(
    function: Callable[Concatenate[SparseStream, Wire, P], T],
) -> Callable[Concatenate[SparseStream, Wire, P], T]:
    """Make ``function(stream, wire, …)`` a call that the ranks compare: see `Communicator.call`.

    The arguments after the wire, its format, and the stream's size, dtype and width must be the
    same on all ranks.
    """

    @wraps(function)
    def call(stream: SparseStream, wire: Wire, /, *args: P.args, **kwargs: P.kwargs) -> T:
        check_type(wire, Wire, "wire", "sparcel.all_reduce and sparcel.all_reduce_topk take groups")
        facts = (
            *(("size", stream.size), ("dtype", stream.dtype), ("width", stream.width)),
            ("format", wire.format),
        )
        same = call_of(function, facts, args, tuple(kwargs.items()))
        return wire.comm.call(same, partial(function, stream, wire, *args, **kwargs))

    return call


def _cut(parts: Sequence[Tensor], count: int, source: int, rank: int) -> list[Message]:
    """Return the messages that rank ``source`` has sent in one to a rank."""
    try:
        return formats.cut(parts, count)
    except FormatError as error:
        raise FormatError(
            f"rank {source} sent rank {rank} something else than {count} messages in one: {error};"
            " every rank must call the same collective"
        ) from None
