"""Islands that are killed and started at random moments: the benchmark of that, in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.outer import chaos
from sparcel.tools.lab import Link, open_network


@pytest.mark.slow
def test_no_survivor_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "WAIT_S", 2.5)
    with open_network(chaos.MOST + 1, Link()) as network:
        row = chaos.run(network, tmp_path, events=10, seed=1)
    assert row["faults"] == []
    assert row["kills"] + row["joins"] + row["restarts"] == 10
    assert row["restarts"] == 1
    assert row["steps"] > 6
