"""The order of work on a GPU's streams, by a stand-in for CUDA's: there is no GPU in the tests.

A stream here knows which pieces of work precede what is queued next, as events tell it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from sparcel import SparseStream, simulate
from sparcel.core.comm import Communicator
from sparcel.core.comm.jobs import JobQueue, submit_beside
from sparcel.core.comm.staged import Staged
from sparcel.core.schemes import TopK
from sparcel.core.side_stream import SideStream, as_here, refuse_capture, used_here
from sparcel.core.training import Averager
from sparcel.errors import InputError

GPU = torch.device("cuda", 0)


@dataclass(eq=False)
class Event:
    before: set[str]
    passed: bool = False

    def query(self) -> bool:
        return self.passed


@dataclass(eq=False)
class Stream:
    device: torch.device = GPU
    priority: int = 0
    before: set[str] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)

    def record_event(self) -> Event:
        self.events.append(Event(set(self.before)))
        return self.events[-1]

    def wait_event(self, event: Event) -> None:
        self.before |= event.before


class Cuda(threading.local):
    """The current stream of each thread, and what was queued by all of them."""

    def __init__(self, queued: dict[str, set[str]]) -> None:
        self.queued = queued
        self.current = Stream()

    def work(self, name: str) -> None:
        """Queue work on this thread's stream."""
        self.queued[name] = set(self.current.before)
        self.current.before.add(name)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda({})
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: cuda.current)
    monkeypatch.setattr(torch.cuda, "stream", cuda.on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return cuda


class OnGpu(Tensor):
    """A tensor that notes which streams use it."""

    is_cuda = True
    device = GPU

    def record_stream(self, stream: Stream) -> None:
        self.__dict__.setdefault("streams", []).append(stream)


def on_gpu() -> Any:
    return torch.zeros(3).as_subclass(OnGpu)


def test_a_job_runs_after_its_submitter_and_before_its_waiter(cuda: Cuda) -> None:
    queue, side = JobQueue("test"), SideStream(GPU)
    cuda.work("backward of a")
    first = submit_beside(side, queue.submit, lambda: cuda.work("exchange of a"))
    cuda.work("backward of b")
    second = submit_beside(side, queue.submit, lambda: cuda.work("exchange of b"))
    cuda.work("backward of c")
    first.wait()
    second.wait()
    cuda.work("optimiser")
    assert side.stream.priority == -1
    assert cuda.queued == {
        "backward of a": set(),
        "exchange of a": {"backward of a"},
        "backward of b": {"backward of a"},
        "exchange of b": {"backward of a", "backward of b", "exchange of a"},
        "backward of c": {"backward of a", "backward of b"},
        "optimiser": {*(f"backward of {x}" for x in "abc"), "exchange of a", "exchange of b"},
    }


def test_a_job_that_waits_for_its_submitter_runs_on_its_stream(cuda: Cuda) -> None:
    queue = JobQueue("test")
    cuda.work("before")
    queue.submit(as_here(lambda: cuda.work("job"), GPU)).wait()
    cuda.work("after")
    assert cuda.queued == {"before": set(), "job": {"before"}, "after": {"before", "job"}}


def test_a_result_is_marked_as_used_by_the_waiter(cuda: Cuda) -> None:
    queue, side = JobQueue("test"), SideStream(GPU)
    stream = SparseStream.unchecked(on_gpu(), on_gpu(), 7, on_gpu())
    job = submit_beside(side, queue.submit, lambda: (stream, [on_gpu()], "text"))
    result = job.wait()
    parts = [stream.indices, stream.values, stream.finite, result[1][0]]
    assert [part.streams for part in parts] == [[cuda.current]] * 4
    used_here(torch.zeros(2), None, 3.0)  # of the CPU


def test_what_a_job_takes_is_kept_until_the_gpu_or_the_waiter_lets_go(cuda: Cuda) -> None:
    queue, side = JobQueue("test"), SideStream(GPU)

    def submit() -> tuple[Any, weakref.ref[Tensor]]:
        taken = torch.zeros(3)
        return submit_beside(side, queue.submit, lambda: taken.sum()), weakref.ref(taken)

    def idle() -> None:
        queue.submit(lambda: None).wait()

    job, taken = submit()
    idle()
    assert taken() is not None
    job.wait()
    assert taken() is None

    taken = submit()[1]  # nobody waits for it
    idle()
    submit()[0].wait()
    assert taken() is not None
    for event in side.stream.events:
        event.passed = True
    submit()[0].wait()
    assert taken() is None


def test_a_job_that_raises_is_ordered_too(cuda: Cuda) -> None:
    queue, side = JobQueue("test"), SideStream(GPU)

    def fail() -> None:
        cuda.work("half")
        raise ZeroDivisionError

    job = submit_beside(side, queue.submit, fail)
    with pytest.raises(ZeroDivisionError):
        job.wait()
    cuda.work("after")
    assert cuda.queued["after"] == {"half"}


def test_a_jobs_own_jobs_are_part_of_it(cuda: Cuda) -> None:
    queue, side = JobQueue("test"), SideStream(GPU)

    def outer() -> None:
        cuda.work("outer")
        submit_beside(side, queue.submit, lambda: cuda.work("inner")).wait()

    submit_beside(side, queue.submit, outer).wait()
    cuda.work("after")
    assert cuda.queued == {"outer": set(), "inner": {"outer"}, "after": {"outer", "inner"}}


def test_communicators_that_were_split_share_the_stream(cuda: Cuda) -> None:
    def compare(comm: Communicator) -> None:
        staged = Staged(comm, GPU)
        assert staged.split(0)._side is staged._side
        assert Staged(comm, GPU)._side is not staged._side

    simulate(2, compare)


def test_steps_in_a_cuda_graph_are_refused(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def tensors() -> dict[str, Tensor]:
        return {"weight": torch.ones(40, 30)}

    def on_rank(comm: Communicator) -> None:
        averager = Averager(tensors(), TopK(0.5), group=comm)
        session, there = averager._session, averager._session.device
        session.device = GPU
        with pytest.raises(InputError, match=r"captured in a CUDA graph; capture .* no_sync\(\)"):
            averager._open()
        session.device = there
        averager.average(tensors())  # nothing was begun

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refuse_capture(torch.device("cpu"))
    simulate(1, on_rank)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match="cannot be captured"):
        submit_beside(SideStream(GPU), JobQueue("test").submit, lambda: None)
