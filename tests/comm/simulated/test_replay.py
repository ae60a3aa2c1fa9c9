"""Networks of nodes: the link and the ports of a message, and the time of its arrival."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import simulate
from sparcel.core.comm import Network, Traffic
from sparcel.errors import InputError
from tests.strategies import case_of, same_stream, worlds

seconds = st.integers(0, 5)
rates = st.sampled_from([1.0, 64.0, 1000.0, float("inf")])
networks = st.builds(Network, seconds, rates, st.integers(1, 18), seconds, rates)


def message(nbytes=1):
    return torch.zeros(nbytes, dtype=torch.uint8)


def sending(*pairs):
    """Return a program in which, for each pair, the first rank sends a byte to the second."""

    def on_rank(comm):
        for source, destination in pairs:
            if comm.rank == source:
                comm.exchange({destination: message()}, {})
            if comm.rank == destination:
                comm.exchange({}, {source: 1})

    return on_rank


def reducing(case):
    """Return a program with messages of many sizes."""

    def on_rank(comm):
        return sparcel.all_reduce(case.streams[comm.rank], algorithm="split_allgather", group=comm)

    return on_rank


def test_messages_inside_a_node_take_its_link_and_others_the_networks():
    report = simulate(
        4,
        sending((0, 1)),
        latency_s=100,
        ranks_per_node=2,
        node_latency_s=3,
        node_bandwidth=0.5,
    )
    assert report.seconds == 5
    assert report.seconds_on(Network(100, 0.25, 1, 3, 0.5)) == 104
    outside = simulate(4, sending((1, 2)), latency_s=100, bandwidth=0.1, ranks_per_node=2)
    assert outside.seconds == 110


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4])
def test_ranks_of_a_node_share_its_port_when_they_send(ranks_per_node):
    pairs = [(rank, rank + ranks_per_node) for rank in range(ranks_per_node)]
    report = simulate(
        2 * ranks_per_node, sending(*pairs), ranks_per_node=ranks_per_node, latency_s=1
    )
    assert report.seconds == ranks_per_node
    assert report.seconds_on(Network(latency_s=1)) == 1


@pytest.mark.parametrize("senders", [1, 2, 3, 4])
def test_ranks_of_a_node_share_its_port_when_they_receive(senders):
    # The node of ranks 0 to 3 gets one message from each of several other nodes.
    pairs = [(4 * (rank + 1), rank) for rank in range(senders)]
    report = simulate(20, sending(*pairs), ranks_per_node=4, latency_s=1)
    assert report.seconds == senders
    assert report.seconds_on(Network(latency_s=1)) == 1


def test_inside_a_node_every_rank_has_a_port_of_its_own():
    report = simulate(8, sending((0, 1), (2, 3), (4, 5), (6, 7)))
    assert report.seconds_on(Network(9, 9, 8, node_latency_s=1)) == 1
    assert report.seconds_on(Network(9, 9, 2, node_latency_s=1)) == 1


def test_ports_of_rank_and_node_work_side_by_side():
    # Rank 0 sends to its neighbour and to the other node at once.
    report = simulate(4, sending((0, 1), (0, 2)), ranks_per_node=2, latency_s=7, node_latency_s=5)
    assert report.seconds == 7


def test_a_shared_port_serves_the_rank_with_the_earliest_clock():
    # Rank 0 sends at time 1, after a message arrived. Rank 1 sends at 0, but is simulated later.
    pairs = [(2, 0), (0, 2), (1, 3)]
    assert simulate(4, sending(*pairs), ranks_per_node=2, latency_s=1).seconds == 2


def test_a_late_message_delays_no_other_message_of_its_node():
    # Rank 0 waits for the end of a chain of four, while rank 1 gets three messages.
    chain = [(4, 6), (6, 8), (8, 10), (10, 0)]
    pairs = [*chain, (12, 1), (14, 1), (16, 1)]
    assert simulate(18, sending(*pairs), ranks_per_node=2, latency_s=1).seconds == 4


@given(worlds, st.integers(1, 18), st.integers(0, 20))
def test_between_nodes_counts_messages_between_nodes(world, ranks_per_node, nbytes):
    def on_rank(comm):
        others = [rank for rank in range(world) if rank != comm.rank]
        comm.exchange({rank: message(nbytes + rank) for rank in others}, dict.fromkeys(others, 99))

    report = simulate(world, on_rank, ranks_per_node=ranks_per_node)
    for rank, crossed in enumerate(report.between_nodes):
        far = [r for r in range(world) if r // ranks_per_node != rank // ranks_per_node]
        sent, received = sum(nbytes + r for r in far), len(far) * (nbytes + rank)
        assert crossed == Traffic(len(far), sent, len(far), received)
    if ranks_per_node == 1:
        assert report.between_nodes == report.traffic


@given(worlds, networks, st.integers(0, 99))
def test_a_run_can_be_timed_on_any_network(world, network, seed):
    case = case_of("random", world, 60, seed=seed)
    free = simulate(world, reducing(case))
    asked = simulate(world, reducing(case), **vars(network))
    assert free.seconds == 0
    assert free.seconds_on(network) == asked.seconds
    assert free.traffic == asked.traffic
    assert all(map(same_stream, free.results, asked.results))


@given(worlds, networks, st.integers(0, 99))
def test_one_node_for_all_is_a_flat_cluster_with_its_links(world, network, seed):
    report = simulate(world, reducing(case_of("random", world, 60, seed=seed)))
    inner = network.node_latency_s, network.node_bandwidth
    outer = network.latency_s, network.bandwidth
    assert report.seconds_on(Network(*outer, world, *inner)) == report.seconds_on(Network(*inner))
    assert report.seconds_on(Network(*outer, 1, *inner)) == report.seconds_on(Network(*outer))


@given(worlds, st.integers(1, 18), st.integers(0, 99))
def test_no_port_is_used_twice_at_a_time(world, ranks_per_node, seed):
    report = simulate(world, reducing(case_of("random", world, 60, seed=seed)))
    total = report.seconds_on(Network(latency_s=1, ranks_per_node=ranks_per_node))
    crossed = simulate(
        world, reducing(case_of("random", world, 60, seed=seed)), ranks_per_node=ranks_per_node
    ).between_nodes
    for first in range(0, world, ranks_per_node):
        node = crossed[first : first + ranks_per_node]
        assert total >= sum(traffic.messages_sent for traffic in node)
        assert total >= sum(traffic.messages_received for traffic in node)


def burn(cpu_s):
    start = time.thread_time()
    while time.thread_time() - start < cpu_s:
        pass


def test_work_costs_the_cpu_time_of_its_rank_if_asked_for():
    def on_rank(comm):
        burn(0.02)
        if comm.rank + 1 < comm.size:
            comm.exchange({comm.rank + 1: message()}, {})
        if comm.rank:
            comm.exchange({}, {comm.rank - 1: 1})
            burn(0.01 * (comm.rank == 1))

    assert simulate(4, on_rank).seconds == 0
    assert simulate(4, on_rank, latency_s=10).seconds == 10
    # All ranks work at once, and then only rank 1.
    worked = simulate(4, on_rank, latency_s=10, cpu_time=True)
    assert 10.03 <= worked.seconds < 10.08
    assert 0.03 <= worked.seconds_on(Network()) < 0.08


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node must be at least 1, got 0"),
        ({"latency_s": -1}, "latency_s must be at least 0, got -1; it is in seconds"),
        ({"node_latency_s": float("nan")}, "node_latency_s must be at least 0, got nan"),
        (
            {"bandwidth": 0},
            "bandwidth must be more than 0, got 0; it is in bytes a second",
        ),
        ({"node_bandwidth": -5}, "node_bandwidth must be more than 0, got -5"),
    ],
)
def test_impossible_networks_are_input_errors(wrong, said):
    with pytest.raises(InputError, match=said):
        simulate(2, lambda comm: None, **wrong)
