"""`sparcel.lab.run`: placement and environment of ranks, their output, and how a run ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from pathlib import Path

import pytest

from sparcel.errors import InputError
from sparcel.tools.lab import (
    EmulatedNetwork,
    Faults,
    Link,
    Loopback,
    WorkerFailedError,
    Workers,
    run,
)

pytestmark = [pytest.mark.network, pytest.mark.processes, pytest.mark.usefixtures("emulation")]

NODES, RANKS_PER_NODE = 3, 2


def run_python(
    script: str, nodes: int = NODES, ranks_per_node: int = 1, faults: Faults | None = None
) -> int:
    with EmulatedNetwork(nodes, Link()) as network:
        return run(network, [sys.executable, "-c", script], ranks_per_node, faults=faults)


def reports(script: str, ranks_per_node: int = 1) -> dict[int, list[str]]:
    """Return the JSON that each rank prints, by rank."""
    network = EmulatedNetwork(NODES, Link())
    with network, Workers(network, [sys.executable, "-c", script], None, ranks_per_node) as workers:
        return {rank: json.loads(line) for rank, line in workers.lines()}


@pytest.mark.parametrize("threads", ["1", "3"])
def test_ranks_know_where_they_are_and_the_users_variables_are_kept(
    threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "of another launcher")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads != "1":
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"]
    names += ["MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]
    script = f"import json, os; print(json.dumps([os.environ[name] for name in {names}]))"
    seen = reports(script, RANKS_PER_NODE)
    assert len(seen) == NODES * RANKS_PER_NODE
    for rank, values in seen.items():
        node, local = divmod(rank, RANKS_PER_NODE)
        assert [int(value) for value in values[:6]] == [rank, 6, local, 2, node, node]
        assert values[6:] == ["10.77.0.1", "eth0", threads]


def test_nodes_resolve_their_own_and_each_others_names() -> None:
    script = (
        "import json, socket; name = socket.gethostname();"
        "others = [socket.gethostbyname(f'node{node}') for node in range(3)];"
        "back = socket.getnameinfo(('::ffff:10.77.0.3', 80), 0)[0];"
        "print(json.dumps([name, socket.gethostbyname(name), socket.getfqdn(others[1]), back]))"
    )
    for node, seen in reports(script).items():
        assert seen == [f"node{node}", f"10.77.0.{node + 1}", "node1", "node2"]
    assert not os.uname().nodename.startswith("node0")


def test_the_network_has_its_own_shared_memory() -> None:
    name = f"/dev/shm/{uuid.uuid4()}"
    script = f"open({name!r}, 'a').close(); import json; print(json.dumps('done'))"
    assert set(reports(script).values()) == {"done"}
    assert not Path(name).exists()


def test_links_are_fast_inside_a_node_and_slow_between(programs: str) -> None:
    """Transfer the same to rank 0 from its own node and from another one."""
    link = Link(rate_bits_per_s=20 * 10**6)
    seconds = {}
    for nodes, ranks_per_node in ((1, 2), (2, 1)):
        argv = [sys.executable, programs, "transfer", "receive", "2000000"]
        network = EmulatedNetwork(nodes, link)
        with network, Workers(network, argv, ranks_per_node=ranks_per_node) as workers:
            ((_, line),) = workers.lines()
        seconds[nodes] = json.loads(line)["seconds"]
    assert seconds[2] >= 8 * 2e6 / link.rate_bits_per_s / 1.1
    assert seconds[1] < seconds[2] / 3


def test_lines_are_printed_after_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "import os, sys; r = os.environ['RANK'];"
        "print('out', r); print('err', r, file=sys.stderr); print('no newline', end='')"
    )
    assert run_python(script) == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted(
        f"[{rank}] {text}" for rank in range(NODES) for text in (f"out {rank}", "no newline")
    )
    assert sorted(err.splitlines()) == [f"[{rank}] err {rank}" for rank in range(NODES)]


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("None", 0)]
)
def test_the_exit_code_is_the_failing_ranks(end: str, code: int) -> None:
    assert run_python(f"import os, sys\nif os.environ['RANK'] == '1': {end}") == code


def test_the_first_failure_counts_and_other_ranks_may_print_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit(3)\n"
        "time.sleep(1); print('lost rank 1', file=sys.stderr); sys.exit(4)"
    )
    assert run_python(script) == 3
    err = capsys.readouterr().err
    assert "[0] lost rank 1" in err
    assert "[2] lost rank 1" in err
    assert "sparcel: rank 1 failed (exit status 3)\n" in err


def test_ranks_that_wait_for_a_failed_rank_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparcel.tools.lab.launch.GRACE_S", 0.1)
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(1e6)"
    assert run_python(script) == 3


def test_a_child_that_holds_the_output_open_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparcel.tools.lab.launch._OUTPUT_S", 0.1)
    script = "import subprocess; subprocess.Popen(['sleep', '1000000'], start_new_session=True)"
    assert run_python(script) == 0


def test_killing_a_node_kills_all_its_processes_and_does_not_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Processes that left their session die too; the other nodes' processes end by themselves."""
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '1000000'], start_new_session=True)\n"
        "time.sleep(1); print('alive', child.poll())"
    )
    faults = Faults(kill_node=1, after_s=0.5)
    assert run_python(script, ranks_per_node=RANKS_PER_NODE, faults=faults) == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"[{rank}] alive None" for rank in (0, 1, 4, 5)]
    assert "sparcel: node 1 is killed" in err


def test_only_the_named_node_dies() -> None:
    script = "import os\nprint(os.getpid(), flush=True)\nimport time; time.sleep(1e6)"
    network = EmulatedNetwork(NODES, Link())
    with network, Workers(network, [sys.executable, "-c", script]) as workers:
        lines = workers.lines()
        assert {next(lines)[0] for _ in range(NODES)} == set(range(NODES))
        network.kill_node(2)
        assert workers.processes[2].wait() == -signal.SIGKILL
        assert [process.poll() for process in workers.processes[:2]] == [None, None]


_PING = """
import os, socket, time
if os.environ["RANK"] == "0":
    server = socket.create_server(("", 5000))
    peer = server.accept()[0]
else:
    while True:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
peer.settimeout(0.5)
print("connected", flush=True)
try:
    while True:
        peer.sendall(b"x")
        peer.recv(1)
except TimeoutError:
    print("silence")
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_a_cut_link_drops_packets_without_an_error(delay_s: float) -> None:
    network = EmulatedNetwork(2, Link(delay_s=delay_s))
    with network, Workers(network, [sys.executable, "-c", _PING]) as workers:
        lines = workers.lines()
        assert [next(lines)[1] for _ in range(2)] == ["connected"] * 2
        network.cut_link(1)
        network.cut_link(1)  # changes nothing
        assert [line for _, line in lines] == ["silence"] * 2


def test_a_fault_that_came_too_late_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_python("", faults=Faults(kill_node=1, after_s=1e6)) == 1
    err = capsys.readouterr().err
    assert err == "sparcel: the ranks had ended before the fault was due, after 1e+06 s\n"
    assert run_python("import sys; sys.exit(7)", faults=Faults(cut_link=1, after_s=1e6)) == 7


def test_a_fault_that_cannot_be_caused_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(network: EmulatedNetwork, node: int) -> None:
        raise OSError(f"node {node} is not ours")

    monkeypatch.setattr(EmulatedNetwork, "cut_link", refuse)
    assert run_python("import time; time.sleep(0.3)", faults=Faults(cut_link=1)) == 1
    err = capsys.readouterr().err
    assert "the fault could not be caused: OSError('node 1 is not ours')" in err


@pytest.mark.parametrize("faults", [Faults(kill_node=3), Faults(cut_link=-1)])
def test_a_fault_of_a_missing_node_is_named(faults: Faults) -> None:
    with pytest.raises(InputError, match="the nodes are 0 to 2"):
        run_python("", faults=faults)


def test_workers_need_ranks() -> None:
    with pytest.raises(InputError, match="ranks_per_node=0"):
        Workers(Loopback(1), [sys.executable], ranks_per_node=0)


FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep({later})
    raise ValueError("bad batch")
if os.environ["RANK"] == "2":
    sys.exit(0)
from sparcel.errors import CommunicationError
raise CommunicationError("rank 1 failed: ValueError: bad batch")
"""


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (1, "rank 1 failed (exit status 1): ValueError: bad batch"),  # after the survivor has ended
        (1e6, "rank 1 failed: ValueError: bad batch"),  # it hangs, and only the survivor tells
    ],
)
def test_the_rank_that_failed_is_named_and_no_survivor(
    later: float, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if later > 1:
        monkeypatch.setattr("sparcel.tools.lab.launch.GRACE_S", 0.1)
    assert run_python(FAILING.format(later=later)) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"sparcel: {told}"


def test_lines_raise_the_failure_and_not_a_survivors() -> None:
    argv = [sys.executable, "-c", FAILING.format(later=1)]
    with (
        Workers(Loopback(3), argv) as workers,
        pytest.raises(WorkerFailedError, match=r"^rank 1 failed \(exit status 1\): ValueError"),
    ):
        list(workers.lines())
