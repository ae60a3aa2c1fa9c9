"""The communicator over torch.distributed's process groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from sparcel.comm.base import Communicator, Handle, Traffic
from sparcel.comm.family import Family
from sparcel.comm.fate import Fate
from sparcel.comm.meeting import Meeting
from sparcel.errors import CommunicationError, InputError
from sparcel.ops import SUM, Op

T = TypeVar("T")

_REDUCED_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
)
"""What Gloo and NCCL can reduce."""


class TorchCommunicator(Communicator):
    """Ranks of a torch.distributed process group, with connections of their own.

    Its traffic never mixes with the group's. When one rank fails, all connections of the family
    (the communicator, and all split from it) are closed, and every rank raises the first cause.

    Parameters
    ----------
    meeting
        Where the ranks meet; all ranks construct at the same time. `of` takes a process group.
    """

    def __init__(self, meeting: Meeting, parent: TorchCommunicator | None = None) -> None:
        self.meeting = meeting
        self.rank, self.size = meeting.rank, len(meeting.members)
        self.timeout = meeting.timeout
        # A part's messages are its rank's messages.
        self.traffic = Traffic() if parent is None else parent.traffic
        self.closed = False
        self.engine = meeting.engine()
        self.device = self.engine.device
        self._splits = 0
        self._fate = Fate(meeting.store, self.size)
        self._parent = parent  # lives as long as its parts
        self._family: Family
        if parent is not None:
            self._family = parent._family
        else:
            self._family = Family(meeting.name, self._fate)
            # Not disconnected at once: the other ranks may forget theirs later, or never.
            weakref.finalize(self, self._family.retire).atexit = False
        self._family.engines.append(self.engine)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """Connect the ranks of a process group, all of which call."""
        return cls(Meeting.of(group))

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """See `Communicator.exchange`."""

        def job() -> dict[int, Tensor]:
            received = self.engine.exchange(sends, receives)
            self.traffic.count(sends, received)
            return received

        return self.run(job)

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
        return self.submit(job).wait()

    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """See `Communicator.submit`."""
        if self.closed:
            raise CommunicationError("the communicator was closed")
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

    def _split(self, colour: int) -> Self:
        colours = self.gather_numbers(colour)
        ranks = [rank for rank in range(self.size) if colours[rank] == colour]
        self._splits += 1
        meeting = replace(
            self.meeting,
            store=PrefixStore(f"{self._splits}.{colour}", self.meeting.store),
            members=[self.meeting.members[rank] for rank in ranks],
            rank=ranks.index(self.rank),
        )
        return type(self)(meeting, self)


def connect(group: dist.ProcessGroup | None) -> TorchCommunicator:
    """Return the communicator of a process group, the same one each time until it is closed.

    One that died of a failure is no exception, for a rank cannot know what the others still use:
    when all ranks have closed theirs, they connect anew.

    Parameters
    ----------
    group
        A process group that this process belongs to; None is the default group. All its ranks
        call.

    Raises
    ------
    InputError
        When there is no default group, or the group's engine is neither Gloo nor NCCL.
    CommunicationError
        When not all ranks came within the process group's timeout.
    """
    if group is None:
        if not dist.is_initialized():
            raise InputError(
                "there is no default process group: call torch.distributed.init_process_group "
                "first, or pass group="
            )
        group = dist.group.WORLD
    assert group is not None
    known = _by_group.get(group)
    if known is None or known.closed:
        known = _by_group[group] = TorchCommunicator.of(group)
    return known


_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchCommunicator] = (
    weakref.WeakKeyDictionary()
)
