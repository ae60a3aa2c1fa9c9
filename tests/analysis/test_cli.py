"""``sparcel density`` on the command line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from sparcel.errors import InputError
from sparcel.tools.analysis import expected_nnz, ranks_until_dense
from sparcel.tools.cli import app


def test_density_prints_the_expected_nnz_and_when_the_sum_turns_dense() -> None:
    options = ["--size", "1000000", "--density", "0.02", "--ranks", "48"]
    output = CliRunner().invoke(app, ["density", *options], catch_exceptions=False).output
    assert "20,000 of 1,000,000 coordinates a rank (2 %)" in output
    rows = [line.split() for line in output.splitlines() if "%" in line]
    found = {int(row[0]): row for row in rows if row[0].isdigit()}
    assert list(found) == [2, 4, 8, 16, 32, 48]
    for ranks, row in found.items():
        assert row[1] == f"{expected_nnz(1_000_000, 20_000, ranks):,.0f}"
        assert row[-1] == ("dense" if ranks >= 35 else "sparse")
    assert ranks_until_dense(1_000_000, 20_000) == 35
    assert "From 35 ranks on" in output


def test_a_percentage_is_refused() -> None:
    with pytest.raises(InputError, match=r"for a percentage pass density=0\.02"):
        CliRunner().invoke(
            app, ["density", "--size", "1000", "--density", "2"], catch_exceptions=False
        )
