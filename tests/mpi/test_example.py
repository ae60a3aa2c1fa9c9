"""The page shows the true difference of the two MPI programs, and both print the same."""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi_pool import environment, mpiexec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mpi.md").read_text()
DENSE, SPARSE = ROOT / "examples" / "mpi_dense.py", ROOT / "examples" / "mpi_sparse.py"


def without_docstring(path: Path) -> list[str]:
    return path.read_text().split('"""\n', 1)[1].lstrip("\n").splitlines()


def test_the_difference_shown_is_that_of_the_two_programs() -> None:
    names = DENSE.name, SPARSE.name
    both = without_docstring(DENSE), without_docstring(SPARSE)
    expected = "\n".join(difflib.unified_diff(*both, *names, lineterm=""))
    assert re.findall(r"```diff\n(.*?)\n```", PAGE, re.DOTALL) == [expected]


def run(program: Path) -> str:
    command = [mpiexec(), "-n", "4", sys.executable, str(program)]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.processes
def test_both_programs_print_the_same() -> None:
    printed = run(SPARSE)
    assert printed == run(DENSE)
    assert printed in PAGE
