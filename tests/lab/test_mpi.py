"""MPI programs on the lab's nodes, and the answers of the lab's PMI server."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator

import pytest

from sparcel.tools.lab import EmulatedNetwork, Link, Loopback, Workers, run
from sparcel.tools.lab.pmi import PmiServer

NODES, RANKS_PER_NODE = 2, 2

_PROGRAM = """
import json, os
from mpi4py import MPI
world = MPI.COMM_WORLD
shared = world.Split_type(MPI.COMM_TYPE_SHARED)
total = world.allreduce(10**world.rank)
print(json.dumps([world.rank, int(os.environ["RANK"]), total, shared.size, shared.rank]))
"""


@pytest.mark.network
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["emulated", "loopback"])
def test_ranks_are_the_same_for_mpi(kind: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("mpi4py")
    if kind == "emulated":
        request.getfixturevalue("emulation")
    network = EmulatedNetwork(NODES, Link()) if kind == "emulated" else Loopback(NODES)
    per_node = RANKS_PER_NODE if kind == "emulated" else 1
    ranks, share = NODES * per_node, 2  # nodes of loopback are one
    argv = [sys.executable, "-c", _PROGRAM]
    with network, Workers(network, argv, ranks_per_node=per_node, mpi=True) as workers:
        seen = {rank: json.loads(line) for rank, line in workers.lines()}
        assert workers.started_mpi
    total = int("1" * ranks)
    assert seen == {rank: [rank, rank, total, share, rank % share] for rank in range(ranks)}


@pytest.mark.network
@pytest.mark.processes
@pytest.mark.usefixtures("emulation")
def test_a_program_that_never_starts_mpi_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with EmulatedNetwork(1, Link()) as network:
        assert run(network, ["true"], mpi=True) == 0
    assert "no rank became an MPI rank" in capsys.readouterr().err


class Client:
    """Speaks PMI-1 as an MPI library does."""

    def __init__(self, server: PmiServer, rank: int) -> None:
        self.socket = socket.socket(fileno=socket.dup(server.descriptor(rank)))
        self.answers = self.socket.makefile("r")

    def say(self, line: str) -> None:
        self.socket.sendall(f"{line}\n".encode())

    def hear(self) -> str:
        return self.answers.readline().rstrip("\n")

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def close(self) -> None:
        self.answers.close()
        self.socket.close()


@pytest.fixture
def server() -> Iterator[PmiServer]:
    server = PmiServer(NODES, RANKS_PER_NODE)
    yield server
    server.close()


@pytest.fixture
def clients(server: PmiServer) -> Iterator[list[Client]]:
    clients = [Client(server, rank) for rank in range(NODES * RANKS_PER_NODE)]
    yield clients
    for client in clients:
        client.close()


def test_published_values_can_be_read_after_a_barrier(clients: list[Client]) -> None:
    for rank, client in enumerate(clients):
        assert client.ask(f"cmd=put kvsname=sparcel key=card{rank} value=a#{rank}=").startswith(
            "cmd=put_result rc=0"
        )
    for client in clients:
        client.say("cmd=barrier_in")
    assert [client.hear() for client in clients] == ["cmd=barrier_out rc=0"] * 4
    for client in clients:
        for rank in range(4):
            answer = client.ask(f"cmd=get kvsname=sparcel key=card{rank}")
            assert answer == f"cmd=get_result rc=0 msg=success value=a#{rank}="


SIZE = "cmd=get_universe_size"


def wait_in_barrier(clients: list[Client]) -> None:
    """Let all enter the barrier; once all are in it, each hears no more than what it asks for."""
    for client in clients:
        client.say("cmd=barrier_in")
    for _ in range(2):
        assert {client.ask(SIZE) for client in clients} == {"cmd=universe_size rc=0 size=4"}


def test_a_barrier_waits_for_all(clients: list[Client]) -> None:
    wait_in_barrier(clients[:3])
    late = clients[3]
    assert late.ask("cmd=init pmi_version=1 pmi_subversion=1").startswith("cmd=response_to_init")
    late.say("cmd=barrier_in")
    assert {client.hear() for client in clients} == {"cmd=barrier_out rc=0"}


def test_a_rank_that_dies_in_a_barrier_does_not_count_twice(clients: list[Client]) -> None:
    """The rank must not count both as waiting and as gone."""
    wait_in_barrier(clients[:1])
    clients[0].socket.shutdown(socket.SHUT_WR)
    assert clients[0].hear() == ""  # the server has seen it
    wait_in_barrier(clients[1:3])
    clients[3].say("cmd=barrier_in")
    assert {client.hear() for client in clients[1:]} == {"cmd=barrier_out rc=0"}


def test_ranks_of_a_node_are_told_that_they_share_it(clients: list[Client]) -> None:
    answer = clients[0].ask("cmd=get kvsname=sparcel key=PMI_process_mapping")
    assert answer.endswith("value=(vector,(0,2,2))")


def test_unsupported_requests_are_answered_with_an_error(clients: list[Client]) -> None:
    assert clients[0].ask("cmd=get kvsname=sparcel key=unknown").startswith("cmd=get_result rc=-1")
    assert clients[0].ask("cmd=lookup_name service=x").startswith("cmd=lookup_name rc=-1")


def test_a_rank_that_dies_leaves_the_others_served(clients: list[Client]) -> None:
    clients[0].say("cmd=get\ncmd=put\nno words at all")
    clients[0].socket.shutdown(socket.SHUT_RDWR)
    for client in clients[1:]:
        assert client.ask(SIZE) == "cmd=universe_size rc=0 size=4"
