"""What communicators have in common whose messages an engine carries between processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from sparcel.comm.base import Communicator, Handle, Traffic
from sparcel.comm.engine import Engine
from sparcel.comm.family import Family
from sparcel.comm.fate import Fate
from sparcel.errors import CommunicationError, InputError
from sparcel.ops import SUM, Op

T = TypeVar("T")

_REDUCED_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
)
"""What Gloo, NCCL and MPI can reduce."""


class Meeting(Protocol):
    """Where the ranks of a communicator meet, the same for all but ``rank``."""

    @property
    def rank(self) -> int:
        """Index of this process in ``members``."""

    @property
    def members(self) -> list[int]:
        """What errors call the ranks, by rank."""

    @property
    def timeout(self) -> float:
        """Seconds after which an exchange that hangs raises."""

    def engine(self) -> Engine:
        """Connect to the other ranks, which all do; raises `CommunicationError`."""

    def fate(self) -> Fate:
        """Return the end that the ranks share; called after `engine`."""

    def part(self, ranks: list[int], label: str) -> Self:
        """Return where these ranks meet, this one among them; no two parts share a ``label``."""


class ConnectedCommunicator(Communicator):
    """Ranks in processes of their own, with connections that nothing else uses.

    When one rank fails, all connections of the family (the communicator, and all split from it) are
    closed, and every rank raises the first cause.

    Parameters
    ----------
    meeting
        Where the ranks meet; all ranks construct at the same time.
    parent
        What this is split from.
    """

    def __init__(self, meeting: Meeting, parent: Self | None = None) -> None:
        self.meeting = meeting
        self.rank, self.size = meeting.rank, len(meeting.members)
        self.timeout = meeting.timeout
        # A part's messages are its rank's messages.
        self.traffic = Traffic() if parent is None else parent.traffic
        self.closed = False
        self.engine = meeting.engine()
        self.device = self.engine.device
        self._splits = 0
        self._fate = meeting.fate()
        self._parent = parent  # lives as long as its parts
        self._family: Family
        if parent is not None:
            self._family = parent._family
        else:
            self._family = Family(meeting.members[meeting.rank], self._fate)
            # Not disconnected at once: the other ranks may forget theirs later, or never.
            weakref.finalize(self, self._family.retire).atexit = False
        self._family.engines.append(self.engine)

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """See `Communicator.exchange`."""
        return self._exchange({rank: [message] for rank, message in sends.items()}, receives)

    def exchange_parts(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]
    ) -> dict[int, list[Tensor]]:
        """See `Communicator.exchange_parts`; what comes is whole."""
        return {rank: [message] for rank, message in self._exchange(sends, receives).items()}

    def all_reduce(self, tensor: Tensor, op: Op = SUM) -> None:
        """See `Communicator.all_reduce`.

        Raises
        ------
        InputError
            When ``op`` is a user's, for the engine knows sum, product, min and max alone; when
            the engine does not reduce tensors of that dtype, or that are not contiguous.
        """
        if op.name is None:
            raise InputError(
                f"the engine's dense all-reduce knows sum, product, min and max, got {op}; "
                "algorithm='recursive_doubling' takes any operation"
            )
        if tensor.dtype not in _REDUCED_DTYPES or not tensor.is_contiguous():
            raise InputError(
                f"tensor must be contiguous and one of {_REDUCED_DTYPES}, got {tensor.dtype}"
                f" with strides {tensor.stride()}"
            )

        def job() -> None:
            self.engine.all_reduce(tensor, op)
            self.traffic.count_ring(tensor, self.size)

        self.run(job)

    def split(self, colour: int) -> Self:
        """See `Communicator.split`; the part has connections of its own until it is closed."""
        return self.run(lambda: self._split(colour))

    def run(self, job: Callable[[], T]) -> T:
        """See `Communicator.run`."""
        if self._family.queue.is_current():
            return job()
        self._check_open()
        if self.device.type != "cpu":  # nobody could interrupt a thread that waits inside NCCL
            return self._family.submit(job).wait()
        return self._family.run(job)

    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """See `Communicator.submit`."""
        self._check_open()
        return self._family.submit(job)

    def close(self) -> None:
        """Wait for the jobs submitted so far and disconnect; all ranks call, at about one time.

        Closing a communicator closes what was split from it, and ends their thread. A communicator
        that nobody refers to any more, or that is open when the interpreter exits, closes itself.
        """
        if self.closed:
            return
        self.closed = True
        if self._parent is None:
            self._family.close(seconds=None)
        else:
            with suppress(CommunicationError):  # the family has ended, and this with it
                leaving = self._family.queue.submit(
                    lambda: self._family.leave(self.engine, self._fate)
                )
                leaving.wait()

    def _exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        def job() -> dict[int, Tensor]:
            received = self.engine.exchange(sends, receives)
            self.traffic.count(sends, received)
            return received

        return self.run(job)

    def _check_open(self) -> None:
        if self.closed:
            raise CommunicationError("the communicator was closed")

    def _split(self, colour: int) -> Self:
        colours = self.gather_numbers(colour)
        ranks = [rank for rank in range(self.size) if colours[rank] == colour]
        self._splits += 1
        part = self.meeting.part(ranks, f"{self._splits}.{colour}")
        return type(self)(part, self)
