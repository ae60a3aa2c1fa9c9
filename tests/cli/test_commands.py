"""Every command ends in one line: on Ctrl-C at any time, and for files that it can't use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sparcel.core.cost import stated_rates
from sparcel.tools.cli import run
from sparcel.tools.cli.meet import told
from sparcel.tools.plan.planner import MOST_RANKS

COMMAND = [sys.executable, "-m", "sparcel"]
BENCH = ["bench", "--ranks", "2", "--sizes", "1Ki", "--algorithms", "oktopk"]
PATIENCE_S = 60.0

Outcome = tuple[int, list[str]]


@pytest.fixture
def outcome_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], Outcome]:
    """Run a command in this process; return its status and its lines on standard error."""

    def outcome(arguments: list[str]) -> Outcome:
        monkeypatch.setattr("sys.argv", ["sparcel", *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        code, err = ended.value.code, capsys.readouterr().err
        return (code, err.splitlines()) if isinstance(code, int) else (1, [*err.splitlines(), code])

    return outcome


RATES = json.loads(stated_rates(bandwidth=1e9, latency_s=1e-4, ranks=2).to_json())
BAD_RATES: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "random": bytes(range(256)),
    "a list": b"[1, 2]",
    "another object": b'{"model": "resnet50"}',
    "text for a number": json.dumps({**RATES, "ranks": "2"}).encode(),
    "no ranks": json.dumps({**RATES, "ranks": 0}).encode(),
    "truncated": json.dumps(RATES).encode()[:-20],
}


def test_no_command_waits_for_torch_before_it_needs_it() -> None:
    code = (
        "import sys, sparcel.tools.cli, sparcel.linear;"
        " sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_who_serves_islands_is_told_of_those_that_come_and_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beats = [tmp_path / f"run-mine/run-beat.{island}" for island in (1, 3)]
    beats[0].parent.mkdir()
    known = set[tuple[str, str]]()
    for _ in range(2):
        for beat in beats:
            beat.write_text(json.dumps({"beat": 1, "steps": 5, "seconds": 0.25}))
        known = told(tmp_path, known)
    beats[0].unlink()
    os.utime(beats[1], (0, 0))
    assert told(tmp_path, known) == set()
    assert capsys.readouterr().out.splitlines() == [
        *("mine: island 1 has come", "mine: island 3 has come"),
        *("mine: island 1 has gone, or is silent", "mine: island 3 has gone, or is silent"),
    ]


@pytest.mark.parametrize("kind", [*BAD_RATES, "a folder"])
@pytest.mark.parametrize("command", [["plan"], BENCH])
def test_bad_rates_are_reported_in_one_line(
    command: list[str], kind: str, tmp_path: Path, outcome_of: Callable[[list[str]], Outcome]
) -> None:
    path = tmp_path / "rates.json"
    if kind == "a folder":
        path.mkdir()
    elif (content := BAD_RATES[kind]) is not None:
        path.write_bytes(content)
    code, lines = outcome_of([*command, "--rates", str(path)])
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith("sparcel: can't read rates")
    assert str(path) in lines[0]


def write_gradients(path: Path, kind: str) -> None:
    vector = np.ones(100, dtype=np.float32)
    content = {
        "strings": np.array(["a", "b"]),
        "objects": np.array([{}, None], dtype=object),
        "complex": vector.astype(complex),
        "not finite": vector * np.inf,
        "no entries": vector[:0],
        "three dimensions": vector.reshape(1, 10, 10),
    }.get(kind, vector)
    if kind == "a folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind == "random":
        path.write_bytes(bytes(range(256)))
    elif kind != "missing":
        match path.suffix:
            case ".npy":
                np.save(path, content)
            case ".npz":
                np.savez(path, content)
            case ".pt":
                listed = content.dtype.kind in "UO"
                torch.save(list(content) if listed else torch.from_numpy(content), path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-200])


KINDS = (
    *("strings", "objects", "complex", "not finite", "no entries", "three dimensions"),
    *("a folder", "empty", "random", "missing", "truncated"),
)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt"])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_gradients_are_reported_in_one_line(
    kind: str, suffix: str, tmp_path: Path, outcome_of: Callable[[list[str]], Outcome]
) -> None:
    path = tmp_path / f"gradients{suffix}"
    write_gradients(path, kind)
    code, lines = outcome_of(["bench", "--ranks", "2", "--gradients", str(path)])
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith("sparcel: ")
    assert str(path) in lines[0]


@pytest.mark.parametrize("command", [[*BENCH, "--json"], ["plan", "--measure", "--save"]])
@pytest.mark.parametrize("where", ["a folder", "no folder"])
def test_output_that_cannot_be_written_is_reported_before_anything_runs(
    command: list[str], where: str, tmp_path: Path, outcome_of: Callable[[list[str]], Outcome]
) -> None:
    path = tmp_path if where == "a folder" else tmp_path / "nowhere" / "x.json"
    code, lines = outcome_of([*command, str(path)])
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"sparcel: can't write {path}")


@pytest.mark.parametrize("content", [None, b"", b"[]", bytes(range(256)), b'{"cells": [1]}'])
def test_bad_results_are_reported_in_one_line(
    content: bytes | None, tmp_path: Path, outcome_of: Callable[[list[str]], Outcome]
) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_bytes(content)
    code, lines = outcome_of(["bench", "plot", str(path), "--out", str(tmp_path)])
    assert code == 1
    assert len(lines) == 1
    assert f"{path} holds no results" in lines[0]


@pytest.mark.parametrize("nodes", [MOST_RANKS + 1, 10**6, 10**30])
def test_a_plan_for_too_many_ranks_tells_the_limit(
    nodes: int, outcome_of: Callable[[list[str]], Outcome]
) -> None:
    told = f"sparcel: a plan is for at most {MOST_RANKS} ranks, got {nodes:,}"
    assert outcome_of(["plan", "--nodes", str(nodes)]) == (1, [told])


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def importing(pid: int) -> bool:
    """Whether a process has begun to load torch."""
    return "/torch/" in Path(f"/proc/{pid}/maps").read_text()


def measuring(pid: int) -> bool:
    return len(children(pid)) == 2


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("arguments", "ready"),
    [(["plan"], importing), ([*BENCH, "--iterations", "1000000"], measuring)],
)
def test_ctrl_c_ends_a_command_in_one_line(
    arguments: list[str], ready: Callable[[int], bool], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + PATIENCE_S
    while not ready(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    started = children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err) == (130, "sparcel: interrupted\n")
    assert "Traceback" not in out
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.01)  # a worker that has just started ends itself
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert list(tmp_path.iterdir()) == []
