"""Jobs on a GPU's streams: beside the work of those who submit them, or on their own stream.

A GPU runs what is queued on one stream in order. The thread that runs jobs has another stream than
whoever submits them, so both have to be told when to wait. The host waits for neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sparcel.core import device
from sparcel.errors import InputError

T = TypeVar("T")


class SideStream:
    """A stream of a GPU for the jobs of one queue.

    The work of a job runs after what its submitter had queued on the GPU, and before what whoever
    has waited for the job queues next. The CPU has nothing to order.

    Parameters
    ----------
    place
        The device that jobs use.
    """

    def __init__(self, place: torch.device) -> None:
        self.place = place
        # Other ranks wait for what jobs send, so their work goes before that of a backward pass.
        self.stream = torch.cuda.Stream(place, priority=-1) if place.type == "cuda" else None
        self._kept: deque[SideJob[Any]] = deque()

    def keep(self, job: SideJob[Any]) -> None:
        """Keep what a job uses until the GPU has done its work, unless its waiter takes over."""
        while self._kept and self._kept[0].is_over():
            self._kept.popleft()
        self._kept.append(job)


class SideJob(Generic[T]):
    """One job on a `SideStream`, which begins after what this thread has queued so far.

    torch gives freed memory to the next tensor of the stream on which it was allocated, whatever
    other streams still do with it. So the job, and with it the tensors that it has from its
    submitter, is kept until its waiter's stream is ordered after it. Its result, which was
    allocated on the side stream, is marked as used by the waiter's.
    """

    def __init__(self, side: SideStream, job: Callable[[], T]) -> None:
        self._side = side
        self._job: Callable[[], T] | None = job
        here = _stream_here(side.place)
        self._before = None if here is None else here.record_event()
        self._after: torch.cuda.Event | None = None

    def perform(self) -> T:
        """Run the job on this thread; checks that it leaves are raised at its end."""
        job, stream = self._job, self._side.stream
        assert job is not None, "a job runs once"
        with device.adding_to([]), _on(stream):
            if stream is None or self._before is None:
                return _settled(job)
            stream.wait_event(self._before)
            try:
                return _settled(job)
            finally:
                self._after = stream.record_event()
                self._side.keep(self)

    def join(self, result: object) -> None:
        """Let what this thread queues from now on run after the job, which has ended on the host.

        Parameters
        ----------
        result
            What the job returned, which this thread is going to use; None if it raised.
        """
        here = None if self._after is None else _stream_here(self._side.place)
        if here is not None and self._after is not None:
            here.wait_event(self._after)
            used_here(result)
        self._job = None

    def is_over(self) -> bool:
        """Tell whether what the job uses need not be kept."""
        return self._job is None or self._after is None or self._after.query()

    def future(self) -> torch.futures.Future[T]:
        """Return a future for the result, whose ``wait()`` orders streams as `join` does."""
        side = self._side
        return torch.futures.Future(devices=[] if side.stream is None else [side.place])

    def fulfil(self, future: torch.futures.Future[T], result: T) -> None:
        """Give the result of the job to a future that `future` made."""
        with _on(self._side.stream):  # the future records an event on the current stream
            future.set_result(result)


def as_here(job: Callable[[], T], place: torch.device) -> Callable[[], T]:
    """Return a job that does on any thread what it would do on this one, which waits for it.

    Its work on a GPU goes to this thread's stream, and its checks wait for this thread's reads.
    """
    if place.type not in device.GPUS:
        return job
    stream, checks = _stream_here(place), device.checks()

    def run() -> T:
        with device.adding_to(checks), _on(stream):
            return job()

    return run


def used_here(*results: object) -> None:
    """Tell torch that this thread's stream uses tensors that were allocated on another one.

    Parameters
    ----------
    results
        Tensors, or streams, lists and tuples of them; all else is passed over.
    """
    for tensor in _tensors_in(results):
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def refuse_capture(place: torch.device) -> None:
    """Raise `InputError` if this thread's stream is being captured in a CUDA graph."""
    if place.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InputError(
            "an exchange waits for other ranks and cannot be captured in a CUDA graph; capture the"
            " forward and backward pass without it, under DDP's no_sync(), or capture nothing"
        )


def _tensors_in(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        # A sparse tensor has no memory of its own.
        yield from (result._indices(), result._values()) if result.is_sparse else (result,)
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _tensors_in(part)
    else:
        for name in getattr(type(result), "__slots__", ()):
            yield from _tensors_in(getattr(result, name))


def _settled(job: Callable[[], T]) -> T:
    """Run a job, and raise what its checks have found."""
    result = job()
    device.settle()
    return result


def _stream_here(place: torch.device) -> torch.cuda.Stream | None:
    """Return this thread's stream of a GPU of CUDA."""
    refuse_capture(place)
    return torch.cuda.current_stream(place) if place.type == "cuda" else None


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Queue the block's work on a stream, and use its GPU."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
