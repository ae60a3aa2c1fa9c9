"""Tensors of a GPU over a communicator of the host, by way of pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from sparcel.core.comm.communicator import Communicator
from sparcel.core.comm.engine import ALL_CONTROL, Arrived, Bounds, Leaving, Rows, as_rows, whole
from sparcel.core.comm.jobs import Job, submit_beside
from sparcel.core.device import GPUS, put, put_rows, read_all
from sparcel.core.kernels import row_bytes
from sparcel.core.ops import Op
from sparcel.core.profiling import timed
from sparcel.core.rates import Rates
from sparcel.core.side_stream import SideStream, as_here

T = TypeVar("T")


def carry(comm: Communicator, device: torch.device | None) -> Communicator:
    """Return what carries tensors of a device: a communicator itself, where it can.

    A communicator of the host carries those of a GPU by way of pinned memory. What does so is made
    once, as long as somebody uses it.
    """
    if device is None or device.type not in GPUS or comm.device == device:
        return comm
    if isinstance(comm, Staged):
        return carry(comm.inner, device)
    if comm.device.type != "cpu":
        return comm
    staged = comm.staged.get(device)
    if staged is None:
        staged = comm.staged[device] = Staged(comm, device)
    return staged


class Staged(Communicator):
    """A communicator of the host with the payloads on a GPU.

    What leaves the GPU is copied to pinned memory, all at once, and the host waits for one event.
    What arrives is copied to the GPU, for which nobody waits. Control stays on the host. Messages
    are those of the other communicator, so ranks with and without a GPU may form a group.

    Parameters
    ----------
    inner
        The communicator that carries the messages.
    device
        The GPU.
    side
        The stream of the communicator's jobs, if it is split from another one.
    """

    def __init__(
        self, inner: Communicator, device: torch.device, side: SideStream | None = None
    ) -> None:
        self.inner, self.device = inner, device
        self.rank, self.size, self.timeout = inner.rank, inner.size, inner.timeout
        self.traffic, self.calls, self.label = inner.traffic, inner.calls, inner.label
        self.carrier = f"{inner.carrier} by way of the host"
        self._errors, self._in_job = inner._errors, inner._in_job
        self._side = SideStream(device) if side is None else side
        # What is passed on to another rank need not be copied back.
        self._on_host: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def rates(self) -> Rates | None:
        """See `Communicator`; those of the communicator that carries the messages."""
        return self.inner.rates

    @rates.setter
    def rates(self, rates: Rates | None) -> None:
        self.inner.rates = rates

    @timed("messages")
    def exchange_parts(self, sends: Leaving, receives: Bounds, control: int) -> Arrived:
        """See `Communicator.exchange_parts`; messages arrive as control, payload, or both."""
        near = iter(self._to_host([part for parts in sends.values() for part in parts]))
        leaving = {rank: list(islice(near, len(parts))) for rank, parts in sends.items()}
        arrived = self.inner.exchange_parts(leaving, receives, control)
        return {rank: self._parted(whole(parts), control) for rank, parts in arrived.items()}

    @timed("messages")
    def gather_parts(
        self, parts: Sequence[Tensor], at_most: int, control: int
    ) -> list[Sequence[Tensor]]:
        """See `Communicator.gather_parts`, which the other communicator may do in its own way."""
        messages = self.inner.gather_parts(self._to_host(parts), at_most, control)
        return [
            parts if rank == self.rank else self._parted(whole(message), control)
            for rank, message in enumerate(messages)
        ]

    @timed("messages")
    def gather_blocks(self, block: Tensor, nbytes: Sequence[int], control: int = 0) -> Tensor:
        """See `Communicator.gather_blocks`; the rounds are the host's."""
        (own,) = self._to_host([block])
        blocks = self.inner.gather_blocks(own, nbytes, control)
        return whole(self._parted(blocks, control))

    @timed("messages")
    def swap(self, messages: Rows, bounds: Sequence[int], length: Callable[[Tensor], int]) -> Rows:
        """See `Communicator.swap`; rows are cut to their messages once they are on the host."""
        if self.size == 1:
            return messages
        others = [rank for rank in range(self.size) if rank != self.rank]
        rows: Rows | dict[int, Tensor]
        if isinstance(messages, Tensor):
            (near,) = read_all([messages.view(-1)])
            rows = near.view(messages.shape)
        else:
            near_ones = read_all([messages[rank] for rank in others])
            rows = dict(zip(others, near_ones, strict=True))
        leaving = [torch.empty(0, dtype=torch.uint8, device="cpu")] * self.size
        for rank in others:
            leaving[rank] = rows[rank][: length(rows[rank])]
        arrived = self.inner.swap(leaving, bounds, length)
        return self._in_rows({rank: arrived[rank] for rank in others}, bounds, length)

    @timed("messages")
    def spread(
        self, message: Tensor, bounds: Sequence[int], length: Callable[[Tensor], int]
    ) -> Rows:
        """See `Communicator.spread` and `swap`."""
        if self.size == 1:
            return as_rows({0: message}, 1, row_bytes(bounds))
        (row,) = read_all([message])
        arrived = self.inner.spread(row[: length(row)], bounds, length)
        return self._in_rows(dict(enumerate(arrived)), bounds, length)

    @timed("messages")
    @override
    def all_to_all(
        self, message: Tensor, leaving: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        (near,) = self._to_host([message])
        return self._to_gpu(self.inner.all_to_all(near, leaving, arriving))

    @timed("messages")
    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`; a tensor on the host stays there."""
        if tensor.device.type == "cpu":
            self.inner._all_reduce(tensor, op)
            return
        (content,) = read_all([tensor.reshape(-1).view(torch.uint8)])
        total = content.view(tensor.dtype).view(tensor.shape)
        self.inner._all_reduce(total, op)
        tensor.copy_(total, non_blocking=True)

    def _subgroup(self, ranks: list[int], colour: int) -> Self:
        return type(self)(self.inner._subgroup(ranks, colour), self.device, self._side)

    def run(self, job: Callable[[], T]) -> T:
        """See `Communicator.run`; the job's work on the GPU goes to the caller's stream."""
        return self.inner.run(as_here(job, self.device))

    @override
    def submit(self, job: Callable[[], T]) -> Job[T]:
        return submit_beside(self._side, self.inner.submit, job)

    def close(self) -> None:
        """Close the communicator that carries the messages."""
        self.inner.close()

    @override
    def nodes(self) -> list[int]:
        return self.inner.nodes()

    def _parted(self, message: Tensor, control: int) -> list[Tensor]:
        """Return the control of a message that has arrived, on the host, and its payload."""
        if control >= ALL_CONTROL:
            return [message]
        payload = self._to_gpu(message[control:])
        # A copy of the control, since a part of the message would keep all of its memory.
        return [message[:control].clone(), payload] if control else [payload]

    def _in_rows(
        self, messages: Mapping[int, Tensor], bounds: Sequence[int], length: Callable[[Tensor], int]
    ) -> Tensor:
        """Return messages on the GPU as rows, by one copy."""
        for rank, message in messages.items():
            if message.numel() != (said := length(message)):
                raise self._errors.other_length(rank, message.numel(), said)
        return put_rows(messages, self.size, row_bytes(bounds), self.device)

    def _to_host(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return read_all([self._on_host.get(part, part) for part in parts])

    def _to_gpu(self, message: Tensor) -> Tensor:
        payload = put(message, self.device, torch.uint8)
        self._on_host[payload] = message
        return payload
