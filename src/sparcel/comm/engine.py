"""What a communicator asks of the engine that carries its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from sparcel.errors import CommunicationError
from sparcel.ops import Op


class LostPeerError(CommunicationError):
    """The engine gave up on a peer.

    Parameters
    ----------
    text
        What this rank knows of it.
    late
        Whether the timeout ran out; otherwise the peer closed the connection, or its process
        ended.
    """

    def __init__(self, text: str, late: bool) -> None:
        super().__init__(text)
        self.late = late


class Engine(Protocol):
    """A process group of the engine's, used by one communicator alone, from one thread."""

    @property
    def device(self) -> torch.device:
        """Where messages live."""

    @property
    def waiting(self) -> bool:
        """Whether a thread is inside the engine and waits for a peer."""

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """See `Communicator.exchange_parts`; what comes is whole. Raises `LostPeerError`."""

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`; raises `LostPeerError`."""

    def probe(self) -> None:
        """Raise `LostPeerError` when a connection is broken; from any thread."""

    def abort(self) -> None:
        """Close the connections, from any thread; who waits for this rank stops waiting."""


@contextmanager
def expecting(me: int, members: list[int]) -> Iterator[None]:
    """Turn what is raised when ranks do not come into `CommunicationError`.

    Parameters
    ----------
    me, members
        What errors call this process, and all that meet.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch's and MPI's errors are of these kinds
        others = [member for member in members if member != me]
        raise CommunicationError(
            f"rank {me} could not connect to ranks {others}, which must all be alive and connect"
            f" at about the same time: {error}"
        ) from error
