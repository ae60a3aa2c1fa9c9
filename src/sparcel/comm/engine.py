"""What a communicator asks of the engine that carries its bytes, and the errors of engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sparcel.errors import CommunicationError, MismatchError
from sparcel.ops import Op

SAME_CALLS = "all ranks must make the same calls, in the same order and with the same arguments"


ALL_CONTROL = sys.maxsize
"""How many bytes of a message are control if it has no payload."""


class Engine(Protocol):
    """Connections of one communicator; only one thread at a time uses them."""

    @property
    def device(self) -> torch.device:
        """The device that holds payloads."""

    @property
    def carrier(self) -> str:
        """The name of what carries the messages."""

    @property
    def waiting(self) -> bool:
        """Whether a thread is inside the engine and waits for a peer."""

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        receives: Mapping[int, int],
        call: int,
        control: int,
    ) -> dict[int, list[Tensor]]:
        """See `Communicator.exchange_parts`; an engine on the CPU need not part a message.

        Messages carry the fingerprint ``call``, in a form that the engine chooses.

        Raises
        ------
        LostPeerError
            When a peer is gone or late.
        MismatchError
            When a message carries another fingerprint or is longer than its bound.
        """

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`; raises `LostPeerError`."""

    def probe(self) -> None:
        """Raise `LostPeerError` when a connection is broken; any thread may call."""

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


def lost(me: int, peer: int | None) -> LostPeerError:
    """Return the error of rank ``me`` whose connection to ``peer`` ended.

    None stands for a peer that is not known.
    """
    text = f"rank {me} lost its connection to {_name(peer)}, whose process or network failed"
    return LostPeerError(text, late=False)


def late(me: int, seconds: float, peer: int | None) -> LostPeerError:
    """Return the error of rank ``me`` that waited ``seconds`` for ``peer``.

    None stands for all other ranks.
    """
    return LostPeerError(f"rank {me} waited {seconds:g} s for {_name(peer)}", late=True)


def too_long(peer: int, nbytes: int, me: int, at_most: int) -> MismatchError:
    """Return the error of rank ``me`` to which ``peer`` sent more bytes than it expected."""
    return other_length(peer, nbytes, me, f"at most {at_most}")


def other_length(peer: int, nbytes: int, me: int, expected: int | str) -> MismatchError:
    """Return the error of rank ``me`` to which ``peer`` sent more or fewer bytes than expected."""
    return MismatchError(
        f"rank {peer} sent {nbytes} bytes to rank {me}, which expected {expected}; the ranks'"
        " sizes, dtypes or counts differ"
    )


def other_call(peer: int, me: int) -> MismatchError:
    """Return the error of rank ``me`` to which ``peer`` sent a message of another call."""
    return MismatchError(f"rank {peer} sent rank {me} a message of another call; {SAME_CALLS}")


def _name(peer: int | None) -> str:
    return "the others" if peer is None else f"rank {peer}"
