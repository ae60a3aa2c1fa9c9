"""``sparcel density`` on the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparcel.analysis import expected_nnz, ranks_until_dense


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparcel", "density", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_density_prints_the_expected_nnz_and_when_the_sum_turns_dense() -> None:
    result = run("--size", "1000000", "--density", "0.02", "--ranks", "48")
    assert result.returncode == 0, result.stderr
    assert "20,000 of 1,000,000 coordinates a rank (2 %)" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if "%" in line]
    found = {int(row[0]): row for row in rows if row[0].isdigit()}
    assert list(found) == [2, 4, 8, 16, 32, 48]
    for ranks, row in found.items():
        assert row[1] == f"{expected_nnz(1_000_000, 20_000, ranks):,.0f}"
        assert row[-1] == ("dense" if ranks >= 35 else "sparse")
    assert ranks_until_dense(1_000_000, 20_000) == 35
    assert "From 35 ranks on" in result.stdout


@pytest.mark.slow
def test_a_percentage_is_refused() -> None:
    result = run("--size", "1000", "--density", "2")
    assert result.returncode == 1
    assert "for a percentage pass density=0.02" in result.stderr
    assert "Traceback" not in result.stderr
