"""Ok-Topk as a scheme: what wins, and whose memory keeps what does not."""

import sys

import pytest
import torch

from sparcel import SparseStream, simulate
from sparcel.core.schemes import OkTopK, Request
from sparcel.errors import MismatchError
from tests.schemes.steps import OkTopKByRegions, normal, total
from tests.strategies import full, same_bits


@pytest.mark.parametrize("make", [OkTopK, OkTopKByRegions])
@pytest.mark.parametrize("put_back", ["dropped", "own"])
@pytest.mark.parametrize("size", [400, 20_000])
def test_the_largest_sums_of_what_was_selected_win(make, put_back, size):
    world, k = 4, size // 10
    gradients = [normal(rank, 0, size) for rank in range(world)]
    sent = [full(SparseStream(None, gradient, size).largest(k)) for gradient in gradients]
    sums = sum(sent)
    winners = full(SparseStream(None, sums, size).largest(k))

    def on_rank(comm):
        scheme = make(density=k / size, put_back=put_back)
        return scheme.step(gradients[comm.rank], comm), scheme.memory

    found = simulate(world, on_rank).results
    won = winners != 0
    for (update, memory), gradient, own in zip(found, gradients, sent, strict=True):
        assert torch.equal(update, winners / world)
        if put_back == "own":
            assert torch.equal(memory, torch.where(won, gradient - own, gradient))
    kept = total(memory for _, memory in found)
    assert torch.allclose(kept + winners, total(gradients), atol=1e-5)
    if put_back == "dropped":  # one rank has the whole of each sum that lost
        losers = [
            memory - (gradient - own)
            for (_, memory), gradient, own in zip(found, gradients, sent, strict=True)
        ]
        assert int(sum((one.abs() > 1e-6).int() for one in losers).max()) == 1


@pytest.mark.parametrize(("size", "by_regions"), [(300, False), (20_000, True)])
def test_regions_are_summed_only_where_gathering_takes_more(size, by_regions, monkeypatch):
    calls = []
    module = sys.modules["sparcel.core.collectives.oktopk"]
    original = module.topk_by_regions
    monkeypatch.setattr(module, "topk_by_regions", lambda *args: calls.append(1) or original(*args))
    simulate(4, lambda comm: OkTopK(0.1).step(normal(comm.rank, 0, size), comm))
    assert bool(calls) == by_regions


def test_a_winner_loses_its_velocity_where_it_was_sent():
    world, size = 3, 90

    def on_rank(comm):
        scheme = OkTopKByRegions(density=0.1, momentum=0.5)
        update = scheme.step(normal(comm.rank, 0, size), comm)
        return update, scheme.coordinates()["velocity"]

    found = simulate(world, on_rank).results
    won = found[0][0] != 0
    assert 0 < int(won.sum()) <= 9
    masked = total((velocity == 0) & won for _, velocity in found)
    assert bool((masked[won] >= 1).all())
    assert not any(bool((velocity[~won] == 0).any()) for _, velocity in found)


@pytest.mark.parametrize("put_back", ["dropped", "own"])
def test_ranks_that_ask_for_other_counts_are_told(put_back):
    """Layers of other densities, on a vector that is too large to be gathered."""

    def on_rank(comm):
        density = 0.3 if comm.rank == 1 else 0.31
        request = Request(layers=[(0, 20_000, density)])
        scheme = OkTopK(0.1, put_back=put_back)
        scheme.step(normal(comm.rank, 0, 20_000), comm, request=request)

    with pytest.raises(MismatchError, match=r"k=6000.*k=6200|k=6200.*k=6000"):
        simulate(4, on_rank)


def test_a_void_step_takes_nothing_out_of_memory():
    """All gradients are finite, and the owners' sums are not."""

    def on_rank(comm):
        scheme, request = OkTopKByRegions(0.1), Request()
        scheme.step(normal(comm.rank, 0, 100), comm)
        before = scheme.memory.clone()
        scheme.step(normal(0, 0, 100).sign() * 3e38, comm, request=request)
        assert same_bits(scheme.memory, before)
        return scheme.steps, request.costs.magnitude

    assert simulate(4, on_rank).results == [(1, 0.0)] * 4


def test_a_step_that_does_not_take_effect_leaves_estimates_as_they_were():
    """Another vector of the same step may be void."""

    def on_rank(comm):
        scheme = OkTopK(0.1, threshold="reuse", threshold_steps=1, boundary_steps=1)
        scheme.step(normal(comm.rank, 0, 500), comm)
        before = scheme.state_dict()["estimates"]
        comm.run(lambda: scheme.begin(normal(comm.rank, 1, 500), comm))
        assert scheme.state_dict()["estimates"] == before
        scheme.step(normal(comm.rank, 1, 500), comm)
        assert scheme.state_dict()["estimates"] != before

    simulate(3, on_rank)
