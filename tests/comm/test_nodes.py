"""Ranks are assigned to nodes by the caller, by the launcher's local ranks, or by hostnames."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.errors import CommunicationError, InputError, MismatchError

Members = tuple[list[int], list[int]]


def members(comm: Communicator, ranks_per_node: int | None = None) -> Members:
    """Return the ranks of this rank's node, and the ranks with the same place on all nodes."""
    ranks = comm.grid(ranks_per_node)
    return ranks.node.gather_numbers(comm.rank), ranks.across.gather_numbers(comm.rank)


def blocks(world: int, per_node: int) -> list[Members]:
    """Return the expected result of `members` for each rank, if nodes have consecutive ranks."""
    return [
        (
            [r for r in range(world) if r // per_node == rank // per_node],
            [r for r in range(world) if r % per_node == rank % per_node],
        )
        for rank in range(world)
    ]


@given(st.integers(1, 6), st.integers(1, 6))
def test_given_ranks_form_nodes_on_any_topology(nodes: int, per_node: int) -> None:
    world = nodes * per_node
    report = simulate(world, lambda comm: members(comm, per_node), ranks_per_node=world)
    assert report.results == blocks(world, per_node)


@given(st.integers(1, 6), st.integers(1, 6))
def test_a_simulated_cluster_knows_its_nodes(nodes: int, per_node: int) -> None:
    world = nodes * per_node
    assert simulate(world, members, ranks_per_node=per_node).results == blocks(world, per_node)


def test_children_on_a_simulated_cluster_keep_its_nodes() -> None:
    def on_rank(comm: Communicator) -> list[int]:
        child = comm.split(comm.rank % 2)  # half of each of two nodes of four
        return child.grid().node.gather_numbers(comm.rank)

    expected = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert simulate(8, on_rank, ranks_per_node=4).results == expected


def test_groups_are_made_once_for_a_communicator() -> None:
    def on_rank(comm: Communicator) -> None:
        first, before = comm.grid(), comm.traffic.messages_sent
        assert comm.grid() is first
        assert comm.traffic.messages_sent == before
        assert comm.grid(4) is not first
        assert comm.grid() is first

    simulate(4, on_rank, ranks_per_node=2)


def test_fewer_ranks_than_a_node_has_are_one_node() -> None:
    assert simulate(3, lambda comm: members(comm, 8)).results == blocks(3, 3)


@given(st.integers(2, 17), st.integers(2, 17))
def test_uneven_nodes_are_refused_on_all_ranks(world: int, per_node: int) -> None:
    assume(world > per_node and world % per_node)

    def on_rank(comm: Communicator) -> str:
        with pytest.raises(InputError) as refused:
            comm.grid(per_node)
        return str(refused.value)

    sizes = [per_node] * (world // per_node) + [world % per_node]
    for said in simulate(world, on_rank).results:
        assert said.startswith(f"nodes must have equally many ranks, got {sizes}; give another")


@pytest.mark.parametrize("one", [1, 4, 8])
def test_different_numbers_on_the_ranks_are_refused(one: int) -> None:
    with pytest.raises((MismatchError, CommunicationError, InputError)) as told:
        simulate(4, lambda comm: members(comm, one if comm.rank == 1 else 2))
    assert "divide into nodes differently" in str(told.value)


# The following tests need processes, each with its own environment and hostname.

VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
Places = Sequence[int | None] | None


def found(comm: Communicator, hosts: str, local: Places, variable: str) -> Members | str:
    """Return a new communicator's nodes for these hosts and local ranks, or its error message."""
    child = comm.split(0)
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if local is not None and local[comm.rank] is not None:
        environment[variable] = str(local[comm.rank])
    with (
        patch.object(socket, "gethostname", lambda: f"host {hosts[comm.rank]}"),
        patch.dict(os.environ, environment, clear=True),
    ):
        try:
            return members(child)
        except InputError as refused:
            return str(refused)
        finally:
            child.close()


def all_found(
    comm: Communicator, cases: Sequence[tuple[str, Places]], variable: str = "LOCAL_RANK"
) -> list[Members | str]:
    return [found(comm, hosts, local, variable) for hosts, local in cases]


PAIRS = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
CYCLIC = [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]
TOGETHER = blocks(4, 4)
APART = blocks(4, 1)

CASES: dict[str, tuple[str, Places, list[Members]]] = {
    "hostnames": ("aabb", None, PAIRS),
    "hostnames of cyclic placement": ("abab", None, CYCLIC),
    "one host": ("aaaa", None, TOGETHER),
    "a host each": ("abcd", None, APART),
    "local ranks": ("aabb", [0, 1, 0, 1], PAIRS),
    "local ranks of two launchers on one host": ("aaaa", [0, 1, 0, 1], PAIRS),
    "one launcher, hosts named apart": ("abcd", [0, 1, 2, 3], TOGETHER),
    "local ranks of cyclic placement": ("abab", [0, 0, 1, 1], CYCLIC),
    "a launcher that numbers one a node": ("abcd", [0, 0, 0, 0], APART),
    "a local rank that all inherited": ("aabb", [0, 0, 0, 0], PAIRS),
    "local ranks that only some have": ("aabb", [0, 1, None, None], PAIRS),
    "local ranks that do not count": ("aabb", [1, 3, 1, 3], PAIRS),
}


@pytest.mark.processes
def test_nodes_are_found_by_local_ranks_and_hostnames(run_on) -> None:
    cases = [(hosts, local) for hosts, local, _ in CASES.values()]
    by_rank = run_on(4, all_found, cases)
    for case, (name, (_, _, expected)) in enumerate(CASES.items()):
        assert [nodes[case] for nodes in by_rank] == expected, name


@pytest.mark.processes
@pytest.mark.parametrize("variable", VARIABLES[1:])
def test_variables_of_other_launchers_are_read(run_on, variable: str) -> None:
    by_rank = run_on(4, all_found, [("aaaa", [0, 1, 0, 1])], variable)
    assert [nodes[0] for nodes in by_rank] == PAIRS


@pytest.mark.processes
def test_uneven_hosts_are_refused_on_all_ranks(run_on) -> None:
    for hosts, launched in run_on(4, all_found, [("aaab", None), ("aaaa", [0, 1, 2, 0])]):
        for said in (hosts, launched):
            assert "equally many ranks, got [3, 1]; give another ranks_per_node" in said


def use_of_groups(comm: Communicator) -> tuple[list[int], int, int]:
    """Return the messages and bytes of groups that the communicator counted."""
    ranks = comm.grid(2)
    before = comm.traffic.messages_sent, comm.traffic.bytes_sent
    numbers = ranks.node.gather_numbers(comm.rank) + ranks.across.gather_numbers(comm.rank)
    return numbers, comm.traffic.messages_sent - before[0], comm.traffic.bytes_sent - before[1]


@pytest.mark.processes
def test_groups_count_in_their_ranks_own_traffic(run_on) -> None:
    by_rank = run_on(4, use_of_groups)
    assert by_rank == simulate(4, use_of_groups).results
    assert by_rank == [(node + across, 2, 16) for node, across in PAIRS]
