"""The example of a slow network compares methods; the lab counts what a link carries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.slow_network import combined, report, samples
from sparcel.tools.lab import EmulatedNetwork, LabUnavailableError, Link, link_bytes

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "slow_network.py")


def _emulates() -> bool:
    try:
        EmulatedNetwork(1, Link()).close()
    except LabUnavailableError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.processes
def test_it_compares_on_any_network(tmp_path: Path) -> None:
    rate = "1gbit" if _emulates() else "none"
    file = tmp_path / "results.json"
    lab = [sys.executable, "-m", "sparcel", "lab", "run", "--nodes", "2", "--rate", rate, "--"]
    options = ["--steps", "12", "--schemes", "gtopk", "--seed", "3", "--json", str(file)]
    ended = subprocess.run(
        [*lab, sys.executable, EXAMPLE, *options], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ("[0] Network: 2 processes on loopback" in ended.stdout) == (rate == "none")
    results = json.loads(file.read_text())
    rows = {row["method"]: row for row in results["methods"]}
    of_torch = ("DDP", "DDP bf16", "PowerSGD 4", "PowerSGD 16")
    assert list(rows) == [*of_torch, "sparcel", "sparcel 10 %", "gtopk"]
    n = results["parameters"]
    assert n >= 5_000_000
    assert rows["DDP"]["payload_bytes"] == 4 * n  # 2n(P - 1)/P values
    assert 0.16 < rows["sparcel"]["payload_bytes"] / rows["DDP"]["payload_bytes"] < 0.17
    assert rows["sparcel 10 %"]["payload_bytes"] < 0.06 * rows["DDP"]["payload_bytes"]
    for row in rows.values():
        assert row["exposed_s"] == row["step_s"] - row["compute_s"]
        assert 0.1 < row["accuracy"] <= 1
        assert 0 < row["loss"] < 3
        assert (row["wire_bytes"] is None) == (rate == "none")
        if rate != "none" and row["method"] not in of_torch[1:]:
            # The wire carries headers too, and little else.
            assert 1 <= row["wire_bytes"] / row["payload_bytes"] < 1.25


def test_there_is_no_link_outside_of_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARCEL_LAB_RATE_BITS_PER_S", raising=False)
    assert link_bytes() is None


def _seen(rank: int, **fields: Any) -> dict[str, Any]:
    seen = {"step_s": 0.3 + 0.1 * rank, "compute_s": 0.05, "payload_bytes": 1000 + rank}
    return {**seen, "wire_bytes": None, "accuracy": 0.9, "loss": 0.5, "weights": "same", **fields}


def test_times_are_means_and_bytes_the_worst_rank() -> None:
    row = combined("topk", [_seen(rank) for rank in range(3)])
    assert row["step_s"] == pytest.approx(0.4)
    assert row["exposed_s"] == pytest.approx(0.35)
    assert (row["payload_bytes"], row["wire_bytes"]) == (1002, None)
    ranks = [_seen(rank, wire_bytes=5000 - rank) for rank in (0, 1)]
    assert combined("topk", ranks)["wire_bytes"] == 5000


def test_different_models_on_the_ranks_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="with topk, the ranks ended with different models"):
        combined("topk", [_seen(0), _seen(1, weights="other")])


def test_the_table_fits_a_terminal_and_tells_speedups() -> None:
    rows = [
        combined("DDP", [_seen(0, step_s=0.3)]),
        combined("DDP bf16", [_seen(0, step_s=0.2)]),
        combined("topk", [_seen(0, step_s=0.06, wire_bytes=1234567)]),
    ]
    printed = report(rows).splitlines()
    lines = [" ".join(line.split()) for line in printed]
    assert "DDP 300 ms 50 ms 250 ms 0.00 MB 1.0 0.7 90.0% 0.500" in lines
    assert "topk 60 ms 50 ms 10 ms 1.23 MB 5.0 3.3 90.0% 0.500" in lines
    assert max(len(f"[0] {line}") for line in printed) <= 88


def test_digits_are_split_without_overlap() -> None:
    x, y, x_test, y_test = samples(None)
    assert x.shape == (1433, 64)
    assert x_test.shape == (364, 64)
    assert abs(x.mean()) < 1e-5
    assert abs(x.std() - 1) < 1e-5
    for labels in (y, y_test):
        counts = labels.bincount(minlength=10)
        assert counts.max() <= 1.1 * counts.min()


def test_samples_come_from_a_file(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (19, 4, 3), dtype=np.uint8)
    labels = (np.arange(19) % 5).astype(np.uint8)
    arrays = {"x_train": images[:12], "y_train": labels[:12]}
    arrays |= {"x_test": images[12:], "y_test": labels[12:]}
    np.savez(tmp_path / "some.npz", **arrays)
    x, y, x_test, y_test = samples(tmp_path / "some.npz")
    raw = torch.from_numpy(images[:12].reshape(12, 12).astype(np.float32))
    assert torch.equal(x, (raw - raw.mean()) / raw.std())
    assert x_test.shape == (7, 12)
    assert torch.cat([y, y_test]).tolist() == labels.tolist()
