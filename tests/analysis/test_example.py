"""The example script prints the table of docs/how-to/analysis.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/analysis.md").read_text()


@pytest.mark.slow
def test_the_script_prints_the_page_s_table_and_draws_its_plot(tmp_path: Path) -> None:
    plot = tmp_path / "fill_in.svg"
    result = subprocess.run(
        [sys.executable, ROOT / "examples/fill_in.py", plot],
        capture_output=True,
        text=True,
        # Threads do not help layers this small, and are slow if other tests run at the same time.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    header, *printed = result.stdout.splitlines()
    shown = PAGE.partition(header)[2].strip().split("\n\n")[0].splitlines()
    # Training rounds differently on other processors, which moves the figures a little.
    assert len(shown) > 2 and {_cells(row) for row in shown} <= {_cells(row) for row in printed}
    assert plot.read_text().startswith("<?xml")


def _cells(row: str) -> tuple[str, ...]:
    return tuple(row.split("|")[1:3])
