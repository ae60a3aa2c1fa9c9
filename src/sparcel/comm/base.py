"""The one interface that collectives see, whatever engine carries the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from sparcel.ops import SUM, Op

T = TypeVar("T")


@dataclass
class Traffic:
    """Messages and bytes of one rank, as its communicator counted them.

    Only what collectives hand over is counted, not the engine's own framing. The engine's dense
    all-reduce counts as the ring that it stands for: 2(P−1) messages of n/P elements each way.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0

    def count(self, sent: Mapping[int, Sequence[Tensor]], received: Mapping[int, Tensor]) -> None:
        """Add one exchange, of messages that were sent in parts."""
        self.messages_sent += len(sent)
        self.bytes_sent += sum(part.numel() for parts in sent.values() for part in parts)
        self.messages_received += len(received)
        self.bytes_received += sum(message.numel() for message in received.values())

    def count_gather(self, own: Tensor, messages: Sequence[Tensor]) -> None:
        """Add what sent ``own`` to every other rank and brought ``messages``, ``own`` included."""
        others = len(messages) - 1
        self.messages_sent += others
        self.bytes_sent += others * own.numel()
        self.messages_received += others
        self.bytes_received += sum(message.numel() for message in messages) - own.numel()

    def count_ring(self, tensor: Tensor, ranks: int) -> None:
        """Add a ring all-reduce of ``tensor``."""
        messages, nbytes = 2 * (ranks - 1), 2 * (ranks - 1) * tensor.nbytes // ranks
        self.messages_sent += messages
        self.messages_received += messages
        self.bytes_sent += nbytes
        self.bytes_received += nbytes

    @property
    def volume(self) -> int:
        """The larger of the bytes sent and the bytes received."""
        return max(self.bytes_sent, self.bytes_received)


class Handle(Generic[T]):
    """A job that a communicator runs, or has run, off the caller's thread."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[T] = torch.futures.Future()

    def wait(self) -> T:
        """Block until the job has ended; return its result, or raise what it raised."""
        return self.future.wait()


class Communicator(ABC):
    """A group of ranks that exchange messages.

    Attributes
    ----------
    rank, size
        This process's number in the group, and how many there are.
    timeout
        Seconds after which an exchange that hangs raises.
    device
        Where messages live: the CPU, or the engine's device.
    traffic
        What this rank sent and received so far, parts that were split from this included.
    rates
        What `sparcel.cost.measure` found here, for ``algorithm="auto"`` to go by, the same on all
        ranks; None for the default rates.
    """

    rank: int
    size: int
    timeout: float
    device: torch.device
    traffic: Traffic
    rates: Any = None

    @abstractmethod
    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """Send and receive messages, all outstanding at once, and return what came, by source.

        Parameters
        ----------
        sends
            Message (uint8, ``[nbytes]``) by destination, in the order in which to send them.
            Messages between two ranks arrive in order.
        receives
            For each source the most bytes that its message can have, a bound that both ends know
            alike; the receiver need not know the size itself.

        Raises
        ------
        CommunicationError
            When a peer is gone, reports that it failed, or does not answer within the timeout;
            the communicator cannot be used after that.
        """

    def exchange_parts(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]
    ) -> dict[int, list[Tensor]]:
        """Exchange messages that are given in parts, and return what came, by source, in parts.

        A message is its parts' bytes in order; where the parts end is not transmitted, and where
        those end that are returned is the communicator's business. Otherwise as `exchange`.
        """
        joined = {
            rank: parts[0] if len(parts) == 1 else torch.cat(list(parts))
            for rank, parts in sends.items()
        }
        return {rank: [message] for rank, message in self.exchange(joined, receives).items()}

    def gather(self, message: Tensor, at_most: int) -> list[Tensor]:
        """Send every other rank a message, and return each rank's, by rank, after one round.

        ``at_most`` bounds the bytes of each, alike on all ranks. Otherwise as `exchange`.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        messages = self.exchange(
            dict.fromkeys(others, message), dict.fromkeys(others[::-1], at_most)
        )
        messages[self.rank] = message
        return [messages[rank] for rank in range(self.size)]

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = SUM) -> None:
        """Reduce a dense tensor over all ranks in place, by the engine's own algorithm."""

    @abstractmethod
    def split(self, colour: int) -> Self:
        """Return the communicator of the ranks that gave the same ``colour``; all ranks call.

        Ranks keep their order.
        """

    @abstractmethod
    def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` after all jobs submitted before, and return its result.

        A job is what uses the communicator; jobs of one communicator and of all that were split
        from it run one at a time, in the order of submission, which must be the same on all
        ranks. Called from a job, it runs at once. When a job raises, the peers are told.
        """

    @abstractmethod
    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """Queue ``job`` and return at once."""

    def gather_numbers(self, number: int) -> list[int]:
        """Return the number (64-bit) that each rank gave, by rank, after ⌈log₂P⌉ rounds."""
        held = torch.tensor([number], device=self.device)  # those of the ranks from this one on
        while (distance := held.numel()) < self.size:
            below, above = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            leaving = held[: self.size - distance].view(torch.uint8)
            arrived = self.exchange({below: leaving}, {above: leaving.numel()})[above]
            held = torch.cat((held, arrived.view(torch.int64)))
        return held.roll(self.rank).tolist()
