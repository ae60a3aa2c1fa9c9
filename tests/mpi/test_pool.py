"""The pool of MPI ranks reports a launcher that fails."""

import pytest

from tests import mpi_pool


def test_a_launcher_that_fails_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_pool, "mpiexec", lambda: "false")
    monkeypatch.setattr(mpi_pool, "_LOOK_SECONDS", 0.05)
    pool = mpi_pool.MpiPool()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mpiexec ended with 1 before all came"):
            pool.run_on(2, print)
    pool.kill()
