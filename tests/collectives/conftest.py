"""Tests on real processes in this directory run on every engine."""

import pytest


@pytest.fixture(params=["gloo", "mpi"])
def run_on(request):
    """Run a function on real processes, over Gloo or MPI: see `tests.workers`."""
    return request.getfixturevalue("run_on_gloo" if request.param == "gloo" else "run_on_mpi")
