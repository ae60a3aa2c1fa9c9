"""Tests of the command ``sparcel lab run`` from a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.processes, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "sparcel", "lab", "run", "--nodes", "3"]
_PATIENCE_S = 60.0


def lab(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    ended = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def _running(mark: str) -> list[str]:
    """Return the processes with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in path.read_text(errors="replace"):
                found.append(path.parent.name)
        except OSError:  # it ended meanwhile
            continue
    return found


@pytest.mark.usefixtures("emulation")
def test_faults_and_the_exit_status_reach_the_shell() -> None:
    """Options after the program go to the program, even if the lab has the same."""
    script = 'sleep 2; echo "$0 $1"; [ $RANK != 2 ] || exit 5'
    faults = ["--kill-node", "1", "--after", "500ms", "--ranks-per-node", "1"]
    code, out, err = lab(*faults, "--", "sh", "-c", script, "--nodes", "7")
    assert code == 5
    assert sorted(out.splitlines()) == ["[0] --nodes 7", "[2] --nodes 7"]
    assert err.splitlines() == [
        "sparcel: node 1 is killed",
        "sparcel: rank 2 failed (exit status 5)",
    ]


@pytest.mark.parametrize(
    ("how", "code", "rate"),
    [
        ("SIGINT", 130, "none"),
        ("SIGTERM", 143, "none"),
        ("SIGTERM", 143, "1gbit"),
        ("SIGKILL", -signal.SIGKILL, "1gbit"),
    ],
)
def test_every_way_of_ending_the_command_ends_all_processes(
    how: str, code: int, rate: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if rate != "none":
        request.getfixturevalue("emulation")
    mark = str(uuid.uuid4())
    script = f"echo ready; sleep 1000000; : {mark}"
    process = subprocess.Popen(
        [*COMMAND, "--rate", rate, "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(3)) == [
        f"[{rank}] ready\n" for rank in range(3)
    ]
    process.send_signal(signal.Signals[how])
    process.communicate()
    assert process.returncode == code
    deadline = time.monotonic() + _PATIENCE_S
    while _running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _running(mark) == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def refusing(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a system that refuses to make namespaces."""
    for tool in ("unshare", "nsenter"):
        script = tmp_path / tool
        script.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
        script.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def test_refused_namespaces_are_reported_in_one_line(refusing: dict[str, str]) -> None:
    code, out, err = lab("--", "true", environment=refusing)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "Operation not permitted" in err or sys.platform != "linux"


def test_a_program_runs_on_loopback_if_that_is_allowed(refusing: dict[str, str]) -> None:
    script = 'echo "$RANK of $WORLD_SIZE: $SPARCEL_LAB_DESCRIPTION"; [ $RANK != 1 ] || exit 5'
    code, out, err = lab("--or-loopback", "--", "sh", "-c", script, environment=refusing)
    assert code == 5
    network = "3 processes on loopback, with no rate limit (no emulated network: "
    assert [line.partition(network)[0] for line in sorted(out.splitlines())] == [
        f"[{rank}] {rank} of 3: " for rank in range(3)
    ]
    said, failed = err.splitlines()
    assert said.startswith(f"sparcel: {network}")
    assert "Operation not permitted" in said or sys.platform != "linux"
    assert failed == "sparcel: rank 1 failed (exit status 5)"


def test_loopback_that_was_asked_for_needs_no_word() -> None:
    code, out, err = lab("--rate", "none", "--", "sh", "-c", "echo $RANK")
    assert (code, sorted(out.splitlines()), err) == (0, ["[0] 0", "[1] 1", "[2] 2"], "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kill-node", "3"], "cannot kill node 3: the nodes are 0 to 2"),
        (["--after", "5s"], "add --kill-node or --cut-link"),
        (["--cut-link", "1", "--after", "5"], "such as 5s; got '5'"),
        (["--rate", "1gb"], "such as 1gbit; got '1gb'"),
        (["--rate", "none", "--delay", "50ms"], "--rate none has no links to delay packets"),
        (["--delay", "50"], "such as 5s; got '50'"),
        (["--loss", "100%"], "a loss must be at least 0 and below 100%, got 100%"),
        (["--rate", "none", "--cut-link", "1"], "faults need an emulated network, got 3 processes"),
    ],
)
def test_contradictory_options_are_named(arguments: list[str], message: str) -> None:
    code, _, err = lab(*arguments, "--", "true")
    assert code == 1
    assert len(err.splitlines()) == 1
    assert message in err
