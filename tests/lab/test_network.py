"""The network carries messages at its rate, and is separate from other networks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from sparcel.tools.lab import (
    EmulatedNetwork,
    LabUnavailableError,
    Link,
    Loopback,
    WorkerFailedError,
    Workers,
    open_network,
)

pytestmark = [pytest.mark.network, pytest.mark.processes]

_RATE = 100 * 10**6
_BYTES = 4 * 10**6


def _run(network: EmulatedNetwork | Loopback, argv: list[str]) -> list[tuple[int, str]]:
    with network, Workers(network, argv) as workers:
        return list(workers.lines())


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize(("direction", "nodes"), [("send", 2), ("receive", 3)])
def test_a_link_carries_no_more_than_its_rate(direction: str, nodes: int, programs: str) -> None:
    network = EmulatedNetwork(nodes, Link(rate_bits_per_s=_RATE))
    argv = [sys.executable, programs, "transfer", direction, str(_BYTES)]
    ((rank, line),) = _run(network, argv)
    result = json.loads(line)
    assert rank == 0
    assert result["bytes"] == _BYTES
    assert 8 * result["bytes"] / result["seconds"] <= 1.1 * _RATE


def test_loopback_carries_the_same(programs: str) -> None:
    ((_, line),) = _run(Loopback(3), [sys.executable, programs, "transfer", "send", "1000000"])
    assert json.loads(line)["bytes"] == 1_000_000


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_a_user_namespace_works_as_root_does(
    delay_s: float, monkeypatch: pytest.MonkeyPatch, programs: str
) -> None:
    """Root sees the same when the lab takes it for an ordinary user."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    try:
        network = EmulatedNetwork(2, Link(delay_s=delay_s))
    except LabUnavailableError as error:
        pytest.skip(f"no user namespaces: {error}")
    ((_, line),) = _run(network, [sys.executable, programs, "transfer", "send", "1000000"])
    assert json.loads(line)["bytes"] == 1_000_000


@pytest.mark.usefixtures("emulation")
def test_nodes_see_each_other_and_nothing_else() -> None:
    script = "print(sorted(line.split(':')[0].strip() for line in list(open('/proc/net/dev'))[2:]))"
    lines = _run(EmulatedNetwork(2, Link()), [sys.executable, "-c", script])
    interfaces = {interface for _, line in lines for interface in line.strip("[]").split(", ")}
    # Some kernels put their idle tunnel devices into every new namespace.
    assert {"'eth0'", "'lo'"} <= interfaces <= {"'eth0'", "'lo'", "'tunl0'", "'sit0'", "'ip6tnl0'"}


@pytest.mark.usefixtures("emulation")
def test_addresses_are_the_nodes_own() -> None:
    network = EmulatedNetwork(3, Link())
    addresses = [network.address(node) for node in range(3)]
    script = (
        "import os, socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
        "s.connect((os.environ['MASTER_ADDR'], 1)); print(s.getsockname()[0])"
    )
    lines = _run(network, [sys.executable, "-c", script])
    assert [address for _, address in sorted(lines)] == addresses
    assert len(set(addresses)) == 3


def test_missing_tools_fall_back_on_loopback_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with open_network(2, Link()) as network:
        assert isinstance(network, Loopback)
        assert "\n" not in network.description
        assert "loopback" in network.description
        assert "unshare is missing" in network.description or "Linux" in network.description


def test_refused_namespaces_fall_back_on_loopback_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script in place of unshare prints the error of a kernel that refuses."""
    for tool in ("unshare", "nsenter"):
        script = tmp_path / tool
        script.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with open_network(2, Link()) as network:
        assert isinstance(network, Loopback)
        assert "Operation not permitted" in network.description or sys.platform != "linux"


@pytest.mark.parametrize("nodes", [0, -1, 251])
def test_an_impossible_number_of_nodes_is_named(nodes: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 250 nodes, got {nodes}"):
        open_network(nodes, None)


_FAILING = (
    "import os, sys, time\nif os.environ['RANK'] == '1': raise KeyError('lost')\ntime.sleep(1e6)\n"
)


@pytest.mark.parametrize("kind", ["emulated", "loopback"])
def test_a_failing_worker_is_named_with_its_last_line(
    kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "emulated":
        request.getfixturevalue("emulation")
    network = open_network(3, Link() if kind == "emulated" else None)
    with pytest.raises(
        WorkerFailedError, match=r"rank 1 failed \(exit status 1\): KeyError: 'lost'"
    ):
        _run(network, [sys.executable, "-c", _FAILING])
