"""Broadcast: every rank receives the root's stream."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sparcel.core import patterns
from sparcel.core.comm import ALL_CONTROL, Call, Communicator, gather_in_rounds
from sparcel.core.formats import Expected, Packet, nbytes_of, whole
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire

TREE_BYTES = 4 << 10
"""Messages up to this length go down a tree unscattered, because rounds cost more than bytes."""

LENGTH_BYTES = 8
"""Of the length of a message, on which ranks agree."""


def broadcast(
    stream: SparseStream | None, wire: Wire, root: int, expected: Expected | None = None
) -> SparseStream:
    """Return the root's stream on every rank.

    The root scatters its message in P parts down a binomial tree; then all ranks gather the parts.
    Short messages go down the tree unscattered. If ``expected`` is None, all ranks first agree on
    the message's length. In doing so they also learn if they disagree, for example on the root.

    Parameters
    ----------
    stream
        The root's stream; other ranks may pass None.
    expected
        What all ranks know about the stream, or None. If it is given, the root hears from no rank,
        and may return although others made another call; its next exchange then fails.

    Words of a long message of k entries: the root sends at most 4k, each other rank sends at most
    2k and receives at most 3k.
    Source: van de Geijn's scattered broadcast, as in Thakur, Rabenseifner and Gropp 2005, section
    4.3.
    """
    comm = wire.comm

    def job() -> SparseStream:
        packet = None
        if wire.rank == root:
            assert stream is not None, "the root passes a stream"
            packet = wire.pack(stream)
        if expected is not None:
            at_most = wire.most_bytes(expected)
        else:
            at_most = _largest(0 if packet is None else nbytes_of(packet.message), comm)
        if goes_whole(wire.size, at_most):
            return _down_tree(packet, wire, root, at_most, expected)
        cuts = patterns.cuts(at_most, wire.size)
        held = None if packet is None else whole(packet.message)
        message = _gather(_scatter(held, comm, root, cuts), comm, root, cuts)
        return wire.decode(root, [message], expected) if packet is None else packet.stream

    facts = {"root": root, "expected": expected, "format": wire.format}
    return comm.call(Call.of("broadcast", facts), job)


def tree_broadcast(
    stream: SparseStream | None, wire: Wire, root: int, expected: Expected
) -> SparseStream:
    """Return the root's stream on every rank, sent down a binomial tree: ⌈log₂P⌉ rounds."""
    packet = None if stream is None else wire.pack(stream)
    return _down_tree(packet, wire, root, wire.most_bytes(expected), expected)


def _largest(number: int, comm: Communicator) -> int:
    """Return the largest of the ranks' numbers, in ⌈log₂P⌉ rounds of `LENGTH_BYTES`.

    Every rank hears from every other one, directly or not, so none returns if the ranks disagree.
    """
    for below, above, *_ in patterns.bruck(comm.rank, comm.size):
        leaving = torch.tensor([number], device="cpu").view(torch.uint8)
        arrived = comm.exchange({below: leaving}, {above: LENGTH_BYTES}, ALL_CONTROL)[above]
        number = max(number, int(arrived.view(torch.int64)))
    return number


def _down_tree(
    packet: Packet | None, wire: Wire, root: int, at_most: int, expected: Expected | None
) -> SparseStream:
    """Send the root's packet down a binomial tree, and return its stream."""
    message = None if packet is None else packet.message
    for to, source, *_ in patterns.binomial_tree(wire.rank, wire.size, root):
        if to is not None:
            assert message is not None, "a rank sends only what it has received"
            wire.comm.exchange_parts({to: message}, {}, wire.control)
        elif source is not None:
            message = wire.comm.exchange_parts({}, {source: at_most}, wire.control)[source]
    assert message is not None, "the root has the message, every other rank has a parent"
    return wire.decode(root, message, expected) if packet is None else packet.stream


def _scatter(message: Tensor | None, comm: Communicator, root: int, cuts: Sequence[int]) -> Tensor:
    """Return this rank's part of the root's message.

    Part i is bytes ``[cuts[i], cuts[i + 1])``; it goes to the i-th rank after the root. If the
    message is shorter than ``cuts[-1]``, the last parts are short or empty.
    """
    place, held = (comm.rank - root) % comm.size, message
    for to, source, distance, count in patterns.binomial_tree(comm.rank, comm.size, root):
        if to is not None:
            assert held is not None, "a rank sends only what it has received"
            kept = cuts[place + distance] - cuts[place]
            comm.exchange({to: held[kept:]}, {})
            held = held[:kept]
        elif source is not None:
            held = comm.exchange({}, {source: cuts[place + count] - cuts[place]})[source]
    assert held is not None, "the root has the message, every other rank has a parent"
    return held


def _gather(own: Tensor, comm: Communicator, root: int, cuts: Sequence[int]) -> Tensor:
    """Gather and join the parts of all ranks; see `_scatter`."""
    sizes = [stop - start for start, stop in pairwise(cuts)]

    def cut(parts: list[Tensor], ranks: Sequence[int]) -> Sequence[Tensor]:
        places, arrived = [(rank - root) % comm.size for rank in ranks], torch.cat(parts)
        left, lengths = arrived.numel(), dict.fromkeys(places, 0)
        for place in sorted(places):  # the message's last parts are the ones that may be short
            lengths[place] = min(sizes[place], left)
            left -= lengths[place]
        messages: tuple[Tensor, ...] = arrived.split([lengths[place] for place in places])
        return messages

    bounds = [sizes[(rank - root) % comm.size] for rank in range(comm.size)]
    gathered = gather_in_rounds(comm, own, bounds, list, cut)
    return torch.cat([*gathered[root:], *gathered[:root]])


def goes_whole(ranks: int, at_most: float) -> bool:
    """Tell whether messages of so many bytes go down the tree unscattered."""
    return ranks <= 2 or at_most <= TREE_BYTES
