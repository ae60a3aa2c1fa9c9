"""What a communicator asks of the engine that carries its bytes, and what engines share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from sparcel import _cpu
from sparcel.core import patterns
from sparcel.core.comm.sockets import connect_all, gloo_address
from sparcel.core.ops import Op
from sparcel.errors import CommunicationError, MismatchError

SAME_CALLS = "all ranks must make the same calls, in the same order and with the same arguments"

ALL_CONTROL = sys.maxsize
"""How many bytes of a message are control if it has no payload."""

Leaving: TypeAlias = Mapping[int, Sequence[Tensor]]
"""The parts of messages (uint8, contiguous), by destination."""

Bounds: TypeAlias = Mapping[int, int]
"""The most bytes of messages that are due, by source."""

Arrived: TypeAlias = dict[int, list[Tensor]]
"""The parts of messages that have arrived, by source."""

Rows: TypeAlias = Sequence[Tensor] | Tensor
"""Messages (uint8) by rank, of exact lengths, or rows of a tensor ``[P, L]`` that begin with them.

L is what `sparcel.core.kernels.row_bytes` returns. A row may hold anything beyond its message.
"""


def as_rows(messages: Mapping[int, Tensor], rows: int, nbytes: int) -> Tensor:
    """Return a tensor ``[rows, nbytes]`` whose rows begin with messages, on their device."""
    first = next(iter(messages.values()))
    if rows == 1 and first.numel() == nbytes:
        return first.view(1, nbytes)
    whole = first.new_empty(rows, nbytes)
    for row, message in messages.items():
        whole[row, : message.numel()] = message
    return whole


class Engine(Protocol):
    """Connections of one communicator; only one thread at a time uses them.

    Attributes
    ----------
    device
        The device that holds payloads.
    carrier
        The name of what carries the messages.
    hides_aborts
        Whether a transfer that was aborted ends like any other, and raises nothing.
    """

    device: torch.device
    carrier: str
    hides_aborts: bool

    @property
    def waiting(self) -> bool:
        """Whether a thread is inside the engine and waits for a peer."""

    def exchange(self, sends: Leaving, receives: Bounds, call: int, control: int) -> Arrived:
        """See `Communicator.exchange_parts`; an engine on the CPU need not part a message.

        Messages carry the fingerprint ``call``, in a form that the engine chooses.

        Raises
        ------
        LostPeerError
            When a peer is gone or late.
        MismatchError
            When a message carries another fingerprint or is longer than its bound.
        """

    def all_reduce(self, tensor: Tensor, op: Op, call: int) -> None:
        """See `Communicator.all_reduce`; raises as `exchange`, but for what the engine cannot tell.

        MPI and NCCL send messages of their own, without the fingerprint ``call``.
        """

    def probe(self) -> None:
        """Raise `LostPeerError` when a connection is broken; any thread may call."""

    def lost(self) -> list[int]:
        """Return the peers whose connections have ended, as far as it is known; as `probe`."""

    def abort(self) -> None:
        """Close the connections, so that peers stop waiting; any thread may call."""


class LostPeerError(CommunicationError):
    """The engine gave up on a peer.

    Parameters
    ----------
    text
        What this rank knows of the failure.
    late
        Whether the timeout ran out; otherwise the peer closed the connection, or its process
        ended.
    """

    def __init__(self, text: str, late: bool) -> None:
        super().__init__(text)
        self.late = late


def whole(parts: Sequence[Tensor]) -> Tensor:
    """Return a message, which may have arrived in parts, in one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class PeerErrors:
    """Makes the errors of a rank about its peers, named by numbers that are the same on all ranks.

    Parameters
    ----------
    names
        The numbers by which errors name the ranks, by rank.
    rank
        This process's rank, an index into ``names``.
    """

    def __init__(self, names: Sequence[int], rank: int) -> None:
        self.names, self.me = names, names[rank]

    def lost(self, peer: int | None = None) -> LostPeerError:
        """Return the error of a connection that ended; ``peer`` is None if it is not known."""
        text = (
            f"rank {self.me} lost its connection to {self._name(peer)}, whose process or network"
            " failed"
        )
        return LostPeerError(text, late=False)

    def lost_by(self, error: Exception) -> LostPeerError:
        """Return the error for an engine's own error."""
        return LostPeerError(f"rank {self.me} lost a peer: {error}", late=False)

    def late(self, seconds: float, peer: int | None = None) -> LostPeerError:
        """Return the error of a rank that waited too long for ``peer``; None for all others."""
        text = f"rank {self.me} waited {seconds:g} s for {self._name(peer)}"
        return LostPeerError(text, late=True)

    def other_length(self, peer: int, nbytes: int | str, expected: int | str) -> MismatchError:
        """Return the error of a message with more or fewer bytes than expected."""
        return MismatchError(
            f"rank {self.names[peer]} sent {nbytes} bytes to rank {self.me}, which expected"
            f" {expected}; the ranks' sizes, dtypes or counts differ"
        )

    def other_call(self, peer: int) -> MismatchError:
        """Return the error of a message of another call."""
        return MismatchError(
            f"rank {self.names[peer]} sent rank {self.me} a message of another call; {SAME_CALLS}"
        )

    def _name(self, peer: int | None) -> str:
        return "the others" if peer is None else f"rank {self.names[peer]}"


class MeshEngine:
    """What engines between processes have in common: a connection to each other rank.

    The kernel closes a connection when the process at its other end ends.

    Parameters
    ----------
    store
        A store that all ranks share, under a prefix that nothing else uses.
    names
        The numbers by which errors name the ranks, by rank.
    rank
        This process's rank, an index into ``names``.
    timeout
        Seconds that connecting, and an exchange, may take.
    address
        Where this rank listens; None: where Gloo would.

    Raises
    ------
    OSError, RuntimeError
        When some rank does not connect within the timeout.
    """

    device = torch.device("cpu")
    hides_aborts = False

    def __init__(
        self, store: Store, names: list[int], rank: int, timeout: float, address: str | None = None
    ) -> None:
        self.rank, self.size, self.timeout = rank, len(names), timeout
        self._errors = PeerErrors(names, rank)
        self._aborted = False
        sockets = connect_all(store, address or gloo_address(), rank, self.size, timeout)
        self._mesh = _cpu.Mesh(sockets)

    def probe(self) -> None:
        """See `Engine.probe`."""
        for peer in self.lost():
            raise self._errors.lost(peer)

    def lost(self) -> list[int]:
        """See `Engine.lost`."""
        peers: list[int] = self._mesh.broken()
        return peers

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._aborted = True
        self._mesh.shut()


@dataclass
class Traffic:
    """Messages and bytes of one rank, as its communicator counted them.

    The counter holds the messages that collectives hand over, without the engine's own framing. The
    engine's dense all-reduce counts as a ring: 2(P−1) messages of n/P elements each way.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0

    def count(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Add messages of these bytes."""
        self.messages_sent += len(sent)
        self.bytes_sent += sum(sent)
        self.messages_received += len(received)
        self.bytes_received += sum(received)

    def count_parts(
        self, sent: Iterable[Sequence[Tensor]], received: Iterable[Sequence[Tensor]]
    ) -> None:
        """Add messages in parts."""
        for parts in sent:
            self.messages_sent += 1
            self.bytes_sent += sum(map(Tensor.numel, parts))
        for parts in received:
            self.messages_received += 1
            self.bytes_received += sum(map(Tensor.numel, parts))

    def count_ring(self, tensor: Tensor, ranks: int) -> None:
        """Add a ring all-reduce of ``tensor``."""
        messages, nbytes = 2 * (ranks - 1), ring_bytes(tensor.nbytes, ranks)
        self.messages_sent += messages
        self.messages_received += messages
        self.bytes_sent += nbytes
        self.bytes_received += nbytes

    @property
    def volume(self) -> int:
        """The larger of the bytes sent and the bytes received."""
        return max(self.bytes_sent, self.bytes_received)


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Return how many bytes each rank sends in a ring all-reduce of ``nbytes`` bytes."""
    return 2 * (ranks - 1) * nbytes // ranks


Swap: TypeAlias = Callable[[int, Tensor, int, Tensor], None]
"""``swap(to, leaving, source, arriving)`` sends bytes (uint8) to a rank, and fills others with what
came from another rank. It raises `MismatchError` when that is longer or shorter."""


def reduce_around(tensor: Tensor, op: Op, rank: int, size: int, swap: Swap) -> None:
    """Reduce a contiguous tensor over all ranks in place: reduce-scatter, then all-gather.

    In step s of the first half, a rank sends region rank − s, to which the ranks before it have
    added theirs. In the second half the complete regions travel around. Sums run in an order that
    the world size fixes, so they have the same bits on all ranks and in every run.

    Parameters
    ----------
    op
        One of the built-in operations.
    """
    vector = tensor.detach().view(-1)
    regions = [vector[low:high] for low, high in pairwise(patterns.cuts(len(vector), size))]
    # New memory takes longer to fill than to send, so there is little of it, and it is used again.
    scratch = torch.empty_like(max(regions, key=len))
    around = patterns.ring(rank, size)
    for step, (after, before, *_) in enumerate([*around, *around]):
        leaving, own = regions[(rank - step) % size], regions[(rank - step - 1) % size]
        adds = step < len(around)
        arriving = scratch[: len(own)] if adds else own
        swap(after, leaving.view(torch.uint8), before, arriving.view(torch.uint8))
        if adds:
            op.function(arriving, own, out=own)  # type: ignore[call-arg]  # it is one of torch
