"""A run leaves no process, namespace, mount or file behind, for any way of ending."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparcel.tools.lab import Loopback, Workers

pytestmark = [
    pytest.mark.network,
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

_PATIENCE_S = 60.0


def _holders(namespaces: set[str]) -> list[str]:
    """Return the links under /proc that keep one of the namespaces alive."""
    links = [*Path("/proc").glob("[0-9]*/ns/*"), *Path("/proc").glob("[0-9]*/fd/*")]
    found = []
    for link in links:
        with contextlib.suppress(OSError):  # processes come and go
            if os.readlink(link) in namespaces:
                found.append(str(link))
    return found


def _alive(pids: set[int]) -> list[int]:
    """Return the processes that still exist and are not zombies."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                found.append(pid)
    return found


def _left(pids: set[int]) -> list[int]:
    """Return the processes that exist, at the latest when patience ends."""
    deadline = time.monotonic() + _PATIENCE_S
    while (alive := _alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def test_on_loopback_the_end_of_a_run_ends_what_its_programs_left() -> None:
    script = (
        "from subprocess import DEVNULL, Popen\n"
        "print(Popen(['sleep', '1000'], stdout=DEVNULL, stderr=DEVNULL).pid)"
    )
    with Loopback(2) as network, Workers(network, [sys.executable, "-c", script]) as workers:
        left = {int(pid) for _, pid in workers.lines()}
        assert len(_alive(left)) == 2
    assert _left(left) == []


WORDS = ["raise", "return", "kill node"]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("emulated", how) for how in ["SIGKILL", "SIGINT", *WORDS]),
        *(("delayed", how) for how in ["SIGKILL", "kill node"]),
        pytest.param("mpi", "SIGKILL", marks=pytest.mark.slow),
        *(("loopback", how) for how in ["SIGKILL", "raise"]),
    ],
)
def test_a_run_leaves_nothing_behind(
    kind: str, how: str, programs: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind != "loopback":
        request.getfixturevalue("emulation")
    if kind == "mpi":
        pytest.importorskip("mpi4py")
    mounts = Path("/proc/self/mounts").read_text()
    parent = subprocess.Popen(
        [sys.executable, programs, "parent", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert parent.stdin is not None and parent.stdout is not None
    exists = json.loads(parent.stdout.readline())
    namespaces, pids = set(exists["namespaces"]), set(exists["pids"])
    assert len(_alive(pids)) == len(pids)
    assert bool(_holders(namespaces)) == (kind != "loopback")

    if how in WORDS:
        parent.communicate(f"{how}\n")
    else:
        parent.stdin.write("go on\n")
        parent.stdin.flush()
        parent.send_signal(signal.Signals[how])
        parent.communicate()
    assert (parent.returncode == 0) == (how == "return")

    alive = _left(pids)
    deadline = time.monotonic() + _PATIENCE_S
    while (holders := _holders(namespaces)) and time.monotonic() < deadline:
        time.sleep(0.05)
    # Not looked at again: a run of another test may be given the numbers of ended namespaces.
    assert alive == []
    assert holders == []
    assert Path("/proc/self/mounts").read_text() == mounts
    assert list(tmp_path.iterdir()) == []
