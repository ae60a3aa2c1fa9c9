"""Ok-Topk where the owners of regions sum in their own memories."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import SparseStream, simulate
from sparcel.collectives.oktopk_held import oktopk_held
from sparcel.collectives.regions import balanced_boundaries
from sparcel.memory import Memory, Share
from sparcel.selectors import selector
from sparcel.wire import Wire
from tests.schemes.steps import HeldOkTopK, integers, normal, total
from tests.strategies import case_of, full, layouts, same_bits, same_stream


@given(
    layouts,
    st.integers(1, 17),
    st.integers(0, 70),
    st.integers(1, 80),
    st.sampled_from([torch.float32, torch.float64]),
    st.randoms(use_true_random=False),
)
def test_the_largest_of_all_regions_are_taken_out(layout, world, size, k, dtype, random):
    streams = [stream.largest(size) for stream in case_of(layout, world, size, dtype).streams]
    boundaries = [0, *sorted(random.randint(0, size) for _ in range(world - 1)), size]
    before = integers(3, 1, size, dtype)

    def on_rank(comm):
        start, stop = boundaries[comm.rank : comm.rank + 2]
        held = before[start:stop].clone()
        return oktopk_held(streams[comm.rank], held, boundaries, Wire(comm), k), held

    found = simulate(world, on_rank).results
    sums = before + sum(map(full, streams))
    winners = SparseStream(None, sums, size).largest(k)
    assert all(same_stream(outcome.total, winners) for outcome, _ in found)
    assert torch.equal(torch.cat([held for _, held in found]), sums - full(winners))
    assert torch.equal(torch.cat([full(outcome.arrived) for outcome, _ in found]) + before, sums)
    assert torch.equal(sum(full(outcome.released) for outcome, _ in found), full(winners))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["held", "stream"])
def test_a_region_that_is_not_finite_voids_the_total(where, poison):
    def on_rank(comm):
        held, values = torch.ones(5), torch.ones(2)
        if comm.rank == 1:
            (held if where == "held" else values)[0] = poison
        stream = SparseStream(torch.tensor([3, 11]), values, 15)
        return oktopk_held(stream, held, [0, 5, 10, 15], Wire(comm), 4)

    for outcome in simulate(3, on_rank).results:
        assert not outcome.total.finite
        assert outcome.total.nnz == 0


@given(
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(1, 60),
    st.booleans(),
)
def test_a_selection_outside_a_range_is_the_largest_there(size, one, other, k, ties):
    start, stop = sorted((min(one, size), min(other, size)))
    gradient = integers(1, 2, size) if ties else normal(1, 2, size)
    memory = Memory()
    selection = memory.select(gradient, [Share(0, size, selector("exact"), k)], 0, 1)
    outside = memory.select_outside(selection, start, stop)
    cleared = gradient.clone()
    cleared[start:stop] = 0
    expected = SparseStream(None, cleared, size).largest(selection.nnz)
    assert same_stream(outside, expected)
    assert torch.equal(memory.kept(0, size), gradient - full(expected))


def test_an_owner_adds_its_region_and_sends_of_the_others():
    """All that is known of a coordinate meets at its owner, and stays there if it loses."""
    world, size, k = 4, 400, 40
    gradients = [normal(rank, 0, size) for rank in range(world)]
    tops = [SparseStream(None, gradient, size).largest(k) for gradient in gradients]
    boundaries, _ = simulate(
        world, lambda comm: balanced_boundaries(tops[comm.rank], comm, k)
    ).results[0]
    sums, kept = torch.zeros(size), []
    for rank, gradient in enumerate(gradients):
        others = gradient.clone()
        others[boundaries[rank] : boundaries[rank + 1]] = 0
        sent = full(SparseStream(None, others, size).largest(k))
        sums += sent + (gradient - others)
        kept.append(others - sent)
    winners = full(SparseStream(None, sums, size).largest(k))

    def on_rank(comm):
        scheme = HeldOkTopK(density=k / size)
        return scheme.step(gradients[comm.rank], comm), scheme.memory

    for rank, (update, memory) in enumerate(simulate(world, on_rank).results):
        torch.testing.assert_close(update, winners / world)
        start, stop = boundaries[rank : rank + 2]
        kept[rank][start:stop] = (sums - winners)[start:stop]
        torch.testing.assert_close(memory, kept[rank])


@pytest.mark.parametrize(("size", "held"), [(300, False), (20_000, True)])
def test_owners_hold_only_where_gathering_takes_more(size, held):
    def on_rank(comm):
        schemes = [sparcel.scheme("oktopk", density=0.1), HeldOkTopK(0.1)]
        return [scheme.step(normal(comm.rank, 0, size), comm) for scheme in schemes]

    update, of_held = simulate(4, on_rank).results[0]
    assert same_bits(update, of_held) == held


def test_a_winner_loses_its_velocity_at_its_owner():
    world, size = 3, 90

    def on_rank(comm):
        scheme = HeldOkTopK(density=0.1, momentum=0.5)
        update = scheme.step(normal(comm.rank, 0, size), comm)
        return update, scheme.coordinates()["velocity"], scheme.memory

    found = simulate(world, on_rank).results
    won = found[0][0] != 0
    assert 0 < int(won.sum()) <= 9
    masked = total((velocity == 0) & won for _, velocity, _ in found)
    assert bool((masked[won] >= 1).all())
    for _, velocity, memory in found:
        assert bool((memory[won & (velocity == 0)] == 0).all())
        assert not bool((velocity[~won] == 0).any())
