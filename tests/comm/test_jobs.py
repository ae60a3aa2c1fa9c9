"""The queue of jobs, without any ranks."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from contextlib import suppress
from functools import partial

import pytest

from sparcel.core.comm.jobs import JobQueue
from sparcel.errors import CommunicationError


def test_jobs_run_in_order_off_the_callers_thread() -> None:
    queue, ran = JobQueue("jobs"), []

    def job(number: int) -> int:
        time.sleep(0.001 * (number % 3))
        ran.append((number, threading.current_thread().name))
        return number

    handles = [queue.submit(lambda number=number: job(number)) for number in range(20)]
    assert [handle.wait() for handle in handles] == list(range(20))
    assert ran == [(number, "jobs") for number in range(20)]


def test_errors_keep_their_type_and_traceback() -> None:
    queue = JobQueue("jobs")

    def culprit() -> None:
        raise KeyError("k")

    handle = queue.submit(culprit)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            handle.wait()
        assert any(entry.name == "culprit" for entry in caught.traceback)
    assert queue.submit(lambda: "goes on").wait() == "goes on"


class Held:
    """What the variables of a job, and of whoever waits for it, refer to."""


class DoubledError(Exception):
    """Its message is not what it was made of."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} {reason}")


def test_all_who_wait_are_told_the_same() -> None:
    def fail() -> None:
        raise DoubledError("why") from KeyError("the cause")

    job = JobQueue("jobs").submit(fail)
    for _ in range(3):
        with pytest.raises(DoubledError, match=r"^why why$") as caught:
            job.wait()
        assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("waits", [0, 1, 2])
@pytest.mark.parametrize("future", [False, True])
def test_an_error_keeps_nothing_alive(waits: int, future: bool) -> None:
    queue, watched = JobQueue("jobs"), []

    def fail() -> None:
        held = Held()
        watched.append(weakref.ref(held))
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise LookupError("why") from cause

    def submit_and_wait() -> None:
        held, job = Held(), queue.submit(fail)
        watched.append(weakref.ref(held))
        queue.submit(lambda: None).wait()
        for _ in range(waits):
            with suppress(LookupError):
                job.wait()
        if future:  # torch's, which refers to whoever asks it
            assert job.future.done()

    gc.collect()
    gc.disable()
    try:
        submit_and_wait()
        queue.submit(lambda: None).wait()  # the thread lets go of the last job
        assert [one() for one in watched] == [None, None]
    finally:
        gc.enable()


def test_a_job_that_exits_does_not_end_the_queue() -> None:
    queue = JobQueue("jobs")

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(CommunicationError, match=r"SystemExit\(3\)"):
        queue.submit(leave).wait()
    assert queue.submit(lambda: 1).wait() == 1


def test_a_job_may_submit_and_wait() -> None:
    queue = JobQueue("jobs")
    assert queue.submit(lambda: queue.submit(lambda: 5).wait() + 1).wait() == 6


def test_futures_complete_without_anyone_waiting() -> None:
    queue, done = JobQueue("jobs"), threading.Event()
    handle = queue.submit(lambda: 7)
    handle.future.add_done_callback(lambda future: done.set())
    done.wait()
    assert handle.future.value() == 7


def test_interrupt_ends_the_wait_and_not_the_job() -> None:
    queue, waiting, go = JobQueue("jobs"), threading.Event(), threading.Event()

    def job() -> int:
        waiting.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        go.wait()
        return 1

    def wait() -> None:
        waiting.set()
        handle.wait()

    handle = queue.submit(job)
    with pytest.raises(KeyboardInterrupt):
        wait()
    go.set()
    assert handle.wait() == 1
    assert queue.submit(lambda: 2).wait() == 2


def test_an_ended_queue_has_run_all_jobs_and_refuses_more() -> None:
    queue, ran = JobQueue("jobs"), []
    for number in range(5):
        queue.submit(lambda number=number: ran.append(number))
    queue.end(lambda: ran.append("last"))
    queue.end(lambda: ran.append("never"))
    with pytest.raises(CommunicationError, match="closed"):
        queue.submit(lambda: None)
    assert queue.join(None)
    assert ran == [*range(5), "last"]


@pytest.mark.parametrize("thread_ends_first", [True, False])
def test_a_job_submitted_during_the_end_fails(
    thread_ends_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, go = JobQueue("jobs"), threading.Event()

    def end_meanwhile() -> bool:  # called after submit() has seen that the queue is open
        monkeypatch.undo()
        queue.end(lambda: None if thread_ends_first else go.wait())
        if thread_ends_first:
            queue.join(None)
        return queue.is_current()

    monkeypatch.setattr(queue, "is_current", end_meanwhile)
    handle = queue.submit(lambda: 1)
    go.set()
    with pytest.raises(CommunicationError, match="closed"):
        handle.wait()


def test_joining_gives_up_on_a_job_that_hangs() -> None:
    queue, go = JobQueue("jobs"), threading.Event()
    queue.submit(go.wait)
    queue.end(lambda: None)
    assert not queue.join(0.01)
    go.set()
    assert queue.join(None)


def test_objects_of_a_job_are_freed_with_it() -> None:
    class Captured:
        pass

    queue, captured = JobQueue("jobs"), Captured()
    alive = weakref.ref(captured)
    queue.submit(lambda captured=captured: None).wait()
    del captured
    queue.end(lambda: None)
    assert queue.join(None)
    gc.collect()
    assert alive() is None


def test_a_blocking_job_runs_on_the_callers_thread_if_the_queue_is_empty() -> None:
    queue, go, ran = JobQueue("jobs"), threading.Event(), []

    def note(name: str) -> None:
        ran.append((name, threading.current_thread() is threading.main_thread()))

    queue.run(lambda: note("alone"))
    queue.submit(lambda: (go.wait(), note("queued")))
    threading.Timer(0.05, go.set).start()
    queue.run(lambda: note("behind it"))
    queue.run(lambda: queue.run(lambda: note("inside")))
    assert ran == [("alone", True), ("queued", False), ("behind it", False), ("inside", True)]


def test_jobs_of_many_threads_run_one_at_a_time_in_each_threads_order() -> None:
    queue, running, ran = JobQueue("jobs"), [], []

    def job(thread: int, number: int) -> None:
        assert not running
        running.append(thread)
        time.sleep(0.0001)
        running.pop()
        ran.append((thread, number))

    def use(thread: int) -> None:
        for number in range(0, 100, 2):
            queue.submit(partial(job, thread, number))
            queue.run(partial(job, thread, number + 1))

    threads = [threading.Thread(target=use, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in range(4):
        assert [number for owner, number in ran if owner == thread] == list(range(100))


def test_a_job_that_raises_on_the_callers_thread_frees_the_queue() -> None:
    queue = JobQueue("jobs")
    with pytest.raises(ZeroDivisionError):
        queue.run(lambda: 1 / 0)
    assert queue.run(lambda: 1) == 1
    assert queue.submit(lambda: 2).wait() == 2
    assert queue.since is None


def test_ctrl_c_at_any_point_leaves_the_queue_usable() -> None:
    queue, draw, interrupted = JobQueue("jobs"), random.Random(3), 0

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted += 1
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    for _ in range(2000):
        with suppress(KeyboardInterrupt):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 60e-6))
                for _ in range(20):
                    queue.run(lambda: None)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert interrupted
    done = threading.Event()
    queue.submit(done.set)
    assert done.wait(60)
    queue.end(lambda: None)
    assert queue.join(None)
    assert queue.since is None
    assert not queue.is_current()
