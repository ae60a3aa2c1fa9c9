"""What a communicator asks of the place where its ranks meet in order to connect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, Self

from sparcel.comm.engine import Engine
from sparcel.comm.failure import Failure
from sparcel.errors import CommunicationError


class Rendezvous(Protocol):
    """Where the ranks of one communicator meet; all fields but ``rank`` are equal on all ranks."""

    @property
    def rank(self) -> int:
        """Index of this process in ``members``."""

    @property
    def members(self) -> list[int]:
        """The numbers by which errors name the ranks, by rank."""

    @property
    def timeout(self) -> float:
        """Seconds after which a hanging exchange raises."""

    def engine(self) -> Engine:
        """Connect to the other ranks; all ranks call. Raises `CommunicationError`."""

    def failure(self) -> Failure:
        """Return the failure state that the ranks share; called after `engine`."""

    def subgroup(self, ranks: list[int], label: str) -> Self:
        """Return the rendezvous of some of the ranks, this rank among them.

        Each subgroup has another ``label``.
        """


@contextmanager
def connecting(me: int, members: list[int]) -> Iterator[None]:
    """Turn errors of connecting into `CommunicationError`.

    Parameters
    ----------
    me, members
        The number by which errors name this process, and those of all processes that connect.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:  # the kinds that torch and MPI raise
        others = [member for member in members if member != me]
        raise CommunicationError(
            f"rank {me} could not connect to ranks {others}, which must all be alive and connect"
            f" at about the same time: {error}"
        ) from error
