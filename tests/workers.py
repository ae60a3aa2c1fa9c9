"""Real processes for tests: a pool that runs functions on P ranks over Gloo on loopback.

    def summed(comm, offset):                  # at module level: workers import it by name
        tensor = torch.tensor([comm.rank + offset])
        comm.all_reduce(tensor)
        return tensor.item()

    @pytest.mark.processes
    @pytest.mark.parametrize("world_size", WORLD_SIZES)
    def test_sum(run_on, world_size):
        assert run_on(world_size, summed, 1) == [world_size * (world_size + 1) // 2] * world_size

``run_on(world_size, function, *args)`` calls ``function(comm, *args)`` on ranks 0 … P−1 and
returns the results by rank. ``comm`` is the communicator of a default process group of exactly P
ranks, so that ``group=None`` and DDP work as well. When ranks raise, it raises the first exception
that is not a consequence of another rank's, with the worker's traceback as a note. A world is kept
while calls ask for the same P and its communicator works; `tests/conftest.py` runs the tests of one
P after one another.

Arguments and results are pickled. A pool that does not answer within `PATIENCE_SECONDS` prints
the stacks of its workers, is killed, fails the test and starts anew.

For tests in which workers die, ``run_apart(world_size, function, *args, timeout=)`` starts fresh
processes, whose process group has that timeout, and returns an `Outcome` a rank: its result, its
exception, or how its process ended.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import product
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparcel.core.comm import Communicator, resolve
from sparcel.errors import CommunicationError

WORLD_SIZES = (2, 3, 4, 8)
PATIENCE_SECONDS = 240.0
"""Longer than any test takes on a busy machine, so only a deadlock reaches it."""

ENGINES = ("gloo", "mpi")

_GRACE_SECONDS = 20.0
"""How long the other ranks may still run after one raised."""

# Processes start fast if they are forked from one that has imported what they need, and has done
# nothing else. DDP imports torch._dynamo, which takes longer than all of torch.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.preloaded"])


@dataclass
class Outcome:
    """How a call ended on one rank.

    ``died`` is the exit code of a process that ended without an answer, such as −9.
    """

    result: Any = None
    error: Exception | None = None
    died: int | None = None


@dataclass
class World:
    """A default process group for workers to join."""

    size: int
    port: int
    name: str
    timeout: float


class Pool:
    """Worker processes, some of which form a world; `hire` decides how they are started."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._world: World | None = None
        self._worlds = 0
        # Here and not at rank 0, whose death would take it along.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run_on(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what ``function(comm, *args)`` returns on each of ``world_size`` ranks."""
        if self._world is None or self._world.size != world_size or self._is_dead():
            self.form(world_size, timeout=60.0)
        outcomes = self.call(_run, function, args, grace=_GRACE_SECONDS)
        if any(outcome.error is not None or outcome.died is not None for outcome in outcomes):
            self._recover(outcomes)
        return [outcome.result for outcome in outcomes]

    def form(self, world_size: int, timeout: float) -> None:
        """Make workers leave their world, if any, and the first ``world_size`` join a new one."""
        self._leave()
        self.hire(world_size)
        self._worlds += 1
        self._world = World(world_size, self._store.port, f"world{self._worlds}", timeout)
        outcomes = self.call(self.join, self._world)
        if any(outcome.error is not None or outcome.died is not None for outcome in outcomes):
            self.kill()
            raise RuntimeError(f"the workers could not form a world: {outcomes}")

    @property
    def join(self) -> Callable[[int, World], None]:
        """The function that workers run to join a world."""
        return _join

    @property
    def part(self) -> Callable[[int], None]:
        """The function that workers run to leave their world."""
        return _part

    def hire(self, count: int) -> None:
        """Start workers until there are at least ``count``."""
        while len(self._workers) < count:
            self._workers.append(start_worker(serve))

    def call(
        self, action: Callable[..., Any], *args: Any, grace: float = PATIENCE_SECONDS
    ) -> list[Outcome]:
        """Run ``action`` on each worker of the world, and wait for all of them.

        When one fails, the others may run for ``grace`` seconds more.
        """
        assert self._world is not None
        workers = self._workers[: self._world.size]
        for rank, worker in enumerate(workers):
            worker.send(action, rank, *args)
        outcomes: dict[Worker, Outcome] = {}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(outcomes) < len(workers):
            late = {worker.pipe: worker for worker in workers if worker not in outcomes}
            ready = wait(list(late), max(deadline - time.monotonic(), 0))
            if not ready:
                self.kill(show_stacks=True)
                ranks = [workers.index(worker) for worker in late.values()]
                _raise_first(list(outcomes.values()))
                raise TimeoutError(f"ranks {ranks} of {len(workers)} did not answer")
            for pipe in ready:
                outcome = outcomes[late[pipe]] = late[pipe].receive()
                if outcome.error is not None or outcome.died is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        return [outcomes[worker] for worker in workers]

    def kill(self, show_stacks: bool = False) -> None:
        """Kill all workers, in any state."""
        for worker in self._workers:
            worker.kill(show_stacks)
        self._workers, self._world = [], None

    def _is_dead(self) -> bool:
        return any(outcome.result for outcome in self.call(_is_dead))

    def _leave(self) -> None:
        if self._world is None:
            return
        outcomes = self.call(self.part)
        self._world = None
        if any(outcome.error is not None or outcome.died is not None for outcome in outcomes):
            self.kill()
            raise RuntimeError(f"the workers could not leave their world: {outcomes}")

    def _recover(self, outcomes: Sequence[Outcome]) -> None:
        dead = {rank: o.died for rank, o in enumerate(outcomes) if o.died is not None}
        if dead:
            self.kill()
            raise RuntimeError(f"workers ended (exit code by rank: {dead})")
        self._leave()
        _raise_first(outcomes)


def on_engines_in_turn(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by every combination of the values, each over one of the engines.

    The engines alternate like the colours of a chessboard, so every value of a parameter meets
    both engines where there is another parameter. This is for properties that the simulated
    cluster proves of each combination, and other tests of each engine.
    """
    rows = []
    for places in product(*map(enumerate, parameters.values())):
        engine = ENGINES[sum(number for number, _ in places) % len(ENGINES)]
        rows.append((*(value for _, value in places), engine))
    return pytest.mark.parametrize((*parameters, "run_on"), rows, indirect=["run_on"])


def run_apart(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float
) -> list[Outcome]:
    """Run ``function(comm, *args)`` in fresh processes, which may die."""
    pool = Pool()
    try:
        pool.form(world_size, timeout)
        return pool.call(_run, function, args)
    finally:
        pool.kill()


def _raise_first(outcomes: Sequence[Outcome]) -> None:
    """Raise the error that caused the others, or else the first one."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    causes = [error for error in errors if not isinstance(error, CommunicationError)]
    for error in causes or errors:
        raise error


def start_worker(run: Callable[..., None], *args: Any) -> Worker:
    """Start a process that runs ``run(pipe, *args)``."""
    pipe, theirs = _processes.Pipe()
    process = _processes.Process(target=run, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return Worker(pipe, process)


class Worker:
    """A process, and the pipe to it."""

    def __init__(self, pipe: Connection, process: BaseProcess) -> None:
        self.pipe, self.process = pipe, process

    def send(self, *request: Any) -> None:
        message = pickle.dumps(request)
        with suppress(BrokenPipeError):  # it died; `receive` reports that
            self.pipe.send_bytes(message)

    def receive(self) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join()
            return Outcome(died=self.process.exitcode)
        return outcome

    def kill(self, show_stack: bool) -> None:
        if show_stack and self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.5)
        self.process.kill()
        self.process.join()
        self.pipe.close()


# The rest of this file runs in the workers.

joined: list[Communicator] = []


def serve(pipe: Connection) -> None:
    """Run requests from the pipe and send back their outcomes, until the pipe is closed."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    # Otherwise Gloo looks up the machine's name, which takes seconds if no name server answers.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    with suppress(EOFError):  # the parent is gone
        while True:
            action, rank, *args = pickle.loads(pipe.recv_bytes())
            outcome = Outcome()
            try:
                outcome.result = action(rank, *args)
            except Exception as error:
                error.add_note(f"raised on rank {rank}:\n{traceback.format_exc()}")
                outcome.error = error
            pipe.send_bytes(_pickled(outcome))


def _pickled(outcome: Outcome) -> bytes:
    try:
        message = pickle.dumps(outcome)
        pickle.loads(message)  # some exceptions can be pickled but not loaded
    except Exception as error:
        return pickle.dumps(Outcome(error=RuntimeError(f"cannot pickle {outcome}: {error!r}")))
    return message


@cache
def _store(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def join_gloo(rank: int, world: World) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(world.name, _store(world.port)),
        rank=rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.timeout),
    )


def _join(rank: int, world: World) -> None:
    join_gloo(rank, world)
    joined.append(resolve(None))


def _run(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(joined[0], *args)


def _is_dead(rank: int) -> bool:
    """Tell whether the function before this one failed the communicator."""
    try:
        joined[0].run(lambda: None)
    except CommunicationError:
        return True
    return False


def _part(rank: int) -> None:
    joined.pop().close()
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # DTensor keeps meshes of the world, and takes those for meshes of the next one.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
