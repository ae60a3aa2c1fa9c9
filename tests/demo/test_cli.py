"""Tests of the command ``sparcel demo`` with real processes and networks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparcel.cli import run
from sparcel.lab import EmulatedNetwork, LabUnavailableError, Link

pytestmark = [pytest.mark.processes, pytest.mark.slow]

_DEMO = [sys.executable, "-m", "sparcel", "demo", "--nodes", "2"]
_PATIENCE_S = 60.0


def _start(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*_DEMO, "--json", str(tmp_path / "run.json"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "80"},
    )


def _emulates() -> bool:
    try:
        EmulatedNetwork(1, Link()).close()
    except LabUnavailableError:
        return False
    return True


def _accuracies(rate: str, scheme: str, tmp_path: Path) -> list[float]:
    """Run the demo, check what it prints and writes, and return the methods' accuracies."""
    process = _start(tmp_path, "--rate", rate, "--steps", "12", "--schemes", scheme, "--seed", "3")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert ("loopback" in output) == (rate == "none")
    assert str(tmp_path / "run.json") in output.replace("\n", "")
    results = json.loads((tmp_path / "run.json").read_text())
    assert f"--nodes 2 --rate {'none' if rate == 'none' else '1000mbit'}" in results["command"]
    rows = {row["method"]: row for row in results["methods"]}
    assert list(rows) == ["dense fp32", "dense bf16", scheme]
    assert results["parameters"] >= 5_000_000
    n, world = results["parameters"], 2
    assert rows["dense fp32"]["payload_bytes"] == 2 * 4 * n * (world - 1) / world
    assert rows[scheme]["payload_bytes"] < 0.05 * rows["dense fp32"]["payload_bytes"]
    for row in rows.values():
        assert row["exposed_s"] == row["step_s"] - row["compute_s"]
        assert 0.1 < row["accuracy"] <= 1
        assert (row["wire_bytes"] is None) == (rate == "none")
        if rate != "none":  # the wire carries headers too, and little else
            assert 1 <= row["wire_bytes"] / row["payload_bytes"] < 1.25
    return [row["accuracy"] for row in results["methods"]]


def test_it_compares_on_any_network_and_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    other = "1gbit" if _emulates() else "none"
    assert _accuracies("none", "gtopk", tmp_path) == _accuracies(other, "gtopk", tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schemes", "topl"), "did you mean 'topk'?"),
        (("--density", "3"), "density"),
        (("--density", "0"), "density"),
        (("--rate", "fast"), "such as 1gbit; got 'fast'"),
        (("--json", "nowhere/run.json"), "there is no folder nowhere"),
        (("--data", "."), "has no train-images-idx3-ubyte"),
    ],
)
def test_bad_input_ends_before_anything_runs(
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["sparcel", "demo", "--nodes", "2", *options])
    with pytest.raises(SystemExit) as ended:  # whose message the interpreter prints
        run()
    assert message in str(ended.value)
    assert "Network" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def _workers(parent: int) -> set[int]:
    """Return the demo's worker processes among the descendants of a process."""
    children: dict[int, list[int]] = {}
    workers = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid = int(status.parent.name)
            state, above = status.read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(above), []).append(pid)
            words = (status.parent / "cmdline").read_bytes().split(b"\0")
            # Not the guard or nsenter, which name the worker further back.
            if state != "Z" and b"-m" in words[1:2] and b"sparcel.demo.worker" in words:
                workers.add(pid)
    below, seen = [parent], set()
    while below:
        pid = below.pop()
        seen.add(pid)
        below += children.get(pid, [])
    return workers & seen


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
@pytest.mark.parametrize(
    ("how", "rate"),
    [
        ("a worker is killed", "1gbit"),
        ("SIGINT", "none"),
        ("SIGTERM", "1gbit"),
        ("SIGKILL", "none"),
    ],
)
def test_an_interrupted_demo_leaves_no_process(how: str, rate: str, tmp_path: Path) -> None:
    """The lab's own tests combine every end with every network."""
    if rate != "none" and not _emulates():
        pytest.skip("this machine emulates no network")
    process = _start(tmp_path, "--rate", rate, "--steps", "100000")
    deadline = time.monotonic() + _PATIENCE_S
    while len(workers := _workers(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(workers) == 2, process.stderr
    if how == "a worker is killed":
        os.kill(min(workers), signal.SIGKILL)
    else:
        process.send_signal(signal.Signals[how])
    _, errors = process.communicate()
    assert process.returncode != 0
    if how == "a worker is killed":
        assert process.returncode == 1
        assert re.search(r"sparcel: rank \d failed \(signal 9\)", errors)
    while any(_runs(pid) for pid in workers) and time.monotonic() < deadline + _PATIENCE_S:
        time.sleep(0.1)
    assert [pid for pid in workers if _runs(pid)] == []
    assert list(tmp_path.iterdir()) == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
