"""What a communicator asks of the engine that carries its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from sparcel.errors import CommunicationError, MismatchError
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


def lost(me: int, peer: int | None) -> LostPeerError:
    """Return the error of rank ``me`` whose connection to a rank ended; None is any other."""
    text = f"rank {me} lost its connection to {_called(peer)}, whose process or network failed"
    return LostPeerError(text, late=False)


def late(me: int, seconds: float, peer: int | None) -> LostPeerError:
    """Return the error of rank ``me`` that waited so long for a rank; None is all others."""
    return LostPeerError(f"rank {me} waited {seconds:g} s for {_called(peer)}", late=True)


def too_long(peer: int, nbytes: int, me: int, at_most: int) -> MismatchError:
    """Return the error of rank ``me`` that a rank sent more than it expected."""
    return MismatchError(
        f"rank {peer} sent {nbytes} bytes to rank {me}, which expected at most {at_most}; the"
        " ranks' sizes, dtypes or counts differ"
    )


def _called(peer: int | None) -> str:
    return "the others" if peer is None else f"rank {peer}"


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
