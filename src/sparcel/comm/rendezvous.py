"""Where the ranks of a communicator meet in order to connect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from torch.distributed.distributed_c10d import PrefixStore, Store

from sparcel.comm.engine import Engine
from sparcel.comm.failure import Failure
from sparcel.errors import CommunicationError


@dataclass(frozen=True)
class Rendezvous(ABC):
    """Where the ranks of one communicator meet.

    Attributes
    ----------
    store
        A store under a prefix that no other communicator uses.
    members
        The numbers by which errors name the ranks, by rank; the same on all ranks.
    rank
        Index of this process in ``members``.
    timeout
        Seconds after which a hanging exchange raises, equal on all ranks.
    """

    store: Store
    members: list[int]
    rank: int
    timeout: float

    @abstractmethod
    def engine(self) -> Engine:
        """Connect to the other ranks; all ranks call.

        Raises
        ------
        CommunicationError
            When some rank does not connect within the timeout.
        """

    def failure(self) -> Failure:
        """Return the failure state that the ranks share; called after `engine`."""
        return Failure(self.store, len(self.members))

    def below(self, label: str) -> Store:
        """Return the store with a prefix of its own, made by itself if it is written in Python."""
        under = getattr(self.store, "under", None)
        return PrefixStore(label, self.store) if under is None else under(label)

    def subgroup(self, ranks: list[int], label: str) -> Self:
        """Return the rendezvous of some of the ranks, this rank among them.

        Each subgroup has another ``label``.
        """
        return replace(
            self,
            store=self.below(label),
            members=[self.members[rank] for rank in ranks],
            rank=ranks.index(self.rank),
        )


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
