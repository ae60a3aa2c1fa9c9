"""Settings that all tests share."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.mpi_pool import MpiPool
from tests.workers import Pool

# No deadline, because tests must not fail on a busy machine. The parent is Hypothesis' default
# profile, which is reproducible in CI. `--hypothesis-profile=thorough` runs more examples.
settings.register_profile("sparcel", parent=settings(), deadline=None, max_examples=25)
settings.register_profile("thorough", settings.get_profile("sparcel"), max_examples=400)
settings.load_profile("sparcel")

# A shell without job control starts background processes with SIGINT ignored. Processes that tests
# start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
