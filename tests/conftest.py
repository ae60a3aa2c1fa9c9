"""Settings that all tests share."""

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.mpi_pool import MpiPool
from tests.workers import Pool

# Before any kernel for GPUs is imported: without a GPU, Triton's interpreter runs them on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# No deadline, because tests must not fail on a busy machine. The parent is Hypothesis' default
# profile, which is reproducible in CI. `--hypothesis-profile=thorough` runs more examples.
settings.register_profile("sparcel", parent=settings(), deadline=None, max_examples=25)
settings.register_profile("thorough", settings.get_profile("sparcel"), max_examples=400)
settings.load_profile("sparcel")

# A shell without job control starts background processes with SIGINT ignored. Processes that tests
# start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` runs several processes; tests of threads say how many they want.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what stays: it takes half of the time of a collection.

    After that it looks at what tests make, and at nothing that was there before.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests for the processes of `make test`.

    pytest-xdist gives each process a range of the list; a process that has finished takes over
    tests from the end of another's range (``--dist worksteal``). So each half of the list begins
    with the tests of one engine, and an engine's pool starts in few processes. These tests run by
    world size, because a pool forms a world anew whenever the size changes. The slow tests follow
    those of one engine, so that short ones are left to be taken over at the end; the wheel's are
    the last file and come first, so that they stay in one process.
    """
    by_engine: dict[str, list[pytest.Item]] = {"gloo": [], "mpi": [], "": []}
    for item in items:
        by_engine[engine_of(item)].append(item)
    gloo, mpi, rest = by_engine.values()
    for tests in (gloo, mpi):
        tests.sort(key=lambda item: _parameters(item).get("world_size", 0))
    slow = [item for item in reversed(rest) if item.get_closest_marker("slow")]
    fast = [item for item in rest if not item.get_closest_marker("slow")]
    left = max(len(items) // 2 - len(gloo), 0)
    items[:] = [*gloo, *fast[:left], *mpi, *slow, *fast[left:]]


def engine_of(item: pytest.Item) -> str:
    """Return the engine that a test's fixtures or parameters name, or an empty string."""
    asked = {*getattr(item, "fixturenames", ()), *map(str, _parameters(item).values())}
    if asked & {"mpi", "run_on_mpi"}:
        return "mpi"
    return "gloo" if asked & {"gloo", "run_on_gloo"} else ""


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.fixture(scope="session")
def run_on_gloo() -> Iterator[Callable[..., list[Any]]]:
    """Run a function on real processes: see `tests.workers`."""
    pool = Pool()
    yield pool.run_on
    pool.kill()


@pytest.fixture
def run_on(run_on_gloo: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Run a function on real processes; directories whose tests need other engines override it."""
    return run_on_gloo


@pytest.fixture(scope="session")
def run_on_mpi() -> Iterator[Callable[..., list[Any]]]:
    """Run a function on the ranks of an MPI job: see `tests.mpi_pool`."""
    pool = MpiPool()
    yield pool.run_on
    pool.kill()
