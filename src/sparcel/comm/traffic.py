"""Counts of the messages and bytes that a rank sent and received."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


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
