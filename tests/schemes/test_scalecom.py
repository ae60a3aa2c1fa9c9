"""ScaleCom: the leader's coordinates, all ranks' values, and a volume independent of P."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import simulate
from sparcel.core.selectors import selector
from tests.schemes.steps import integers, normal, total


@given(
    world=st.sampled_from([1, 2, 4, 8]),
    size=st.integers(1, 300),
    name=st.sampled_from(["chunkwise", "exact", "randomk"]),
)
def test_all_ranks_send_the_leaders_coordinates(world, size, name):
    """Ranks lead in turns; the update is the mean there, and each rank keeps the rest."""
    steps, k = world + 2, max(1, -(-size // 10))

    def on_rank(comm):
        scheme, outcomes = sparcel.scheme("scalecom", density=0.1, selector=name), []
        for step in range(steps):
            update = scheme.step(integers(comm.rank, step, size), comm)
            outcomes.append((update, scheme.memory.clone()))
        return outcomes

    results = simulate(world, on_rank).results
    memories = [torch.zeros(size) for _ in range(world)]
    for step in range(steps):
        accumulated = [memories[rank] + integers(rank, step, size) for rank in range(world)]
        chosen = selector(name).select(accumulated[step % world], k, step).indices
        update = torch.zeros(size)
        update[chosen] = (total(accumulated)[chosen] / world).float()
        for rank in range(world):
            accumulated[rank][chosen] = 0
            assert torch.equal(results[rank][step][0], update)
            assert torch.equal(results[rank][step][1], accumulated[rank])
        memories = accumulated


@pytest.mark.parametrize("size", [20_000])
def test_received_bytes_do_not_grow_with_the_ranks(size):
    """k indices (3k/2 on the way of a scattered broadcast) and 2k(P−1)/P values, in every step."""
    k = size // 100
    for world in (2, 4, 8, 16, 32, 64):

        def on_rank(comm):
            scheme, received = sparcel.scheme("scalecom", density=0.01), []
            for step in range(3):
                before = comm.traffic.bytes_received
                scheme.step(normal(comm.rank, step, size), comm)
                received.append(comm.traffic.bytes_received - before)
            return max(received)

        headers = 48 * (3 * world)
        assert max(simulate(world, on_rank).results) <= 4 * (3 * k // 2) + 4 * 2 * k + headers


def test_a_leader_without_gradient_sends_nothing_and_loses_nothing():
    def on_rank(comm):
        scheme = sparcel.scheme("scalecom", density=0.1)
        update = scheme.step(integers(comm.rank, 0, 50) * (comm.rank > 0), comm)
        return update, scheme.memory

    for rank, (update, memory) in enumerate(simulate(4, on_rank).results):
        assert not update.any()
        assert torch.equal(memory, integers(rank, 0, 50) * (rank > 0))


def test_non_finite_ranks_that_do_not_lead_are_noticed():
    def on_rank(comm):
        scheme = sparcel.scheme("scalecom", density=0.1)
        gradient = torch.zeros(50)  # the leader selects nothing
        if comm.rank == 2:
            gradient[7] = float("nan")
        return scheme.step(gradient, comm).isnan().all()

    assert all(simulate(4, on_rank).results)
