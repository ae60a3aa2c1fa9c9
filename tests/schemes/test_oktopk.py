"""Ok-Topk where the owners of regions sum in their own memories."""

import math
import sys
from itertools import pairwise
from threading import Lock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import SparseStream, simulate
from sparcel.collectives.oktopk_held import oktopk_held
from sparcel.collectives.regions import TOLERANCE, TOLERATED, balanced_boundaries
from sparcel.errors import MismatchError
from sparcel.memory import Memory, Share
from sparcel.schemes import OkTopK, Request
from sparcel.schemes._elsewhere import CROWD, select_elsewhere
from sparcel.selectors import selector
from sparcel.wire import Wire
from tests.schemes.steps import HeldOkTopK, integers, normal, total
from tests.strategies import case_of, full, layouts, same_bits, same_stream

schemes_oktopk = sys.modules["sparcel.schemes.oktopk"]


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
    added = SparseStream.from_dense(integers(5, 2, size, dtype)).largest(size // 3)

    def on_rank(comm):
        start, stop = boundaries[comm.rank : comm.rank + 2]
        held, own = before[start:stop].clone(), added.slice(start, stop)
        outcome = oktopk_held(streams[comm.rank], held, own, boundaries, Wire(comm), k)
        assert torch.equal(held, before[start:stop])
        return outcome

    found = simulate(world, on_rank).results
    sums = before + full(added) + sum(map(full, streams))
    winners = SparseStream(None, sums, size).largest(k)
    assert all(same_stream(outcome.total, winners) for outcome in found)
    arrived = torch.cat([full(outcome.arrived) for outcome in found])
    assert torch.equal(before + full(added) + arrived, sums)
    assert torch.equal(sum(full(outcome.released) for outcome in found), full(winners))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["held", "stream"])
def test_a_region_that_is_not_finite_voids_the_total(where, poison):
    nothing = SparseStream(torch.tensor([], dtype=torch.int32), torch.tensor([]), 5)

    def on_rank(comm):
        held, values = torch.ones(5), torch.ones(2)
        if comm.rank == 1:
            (held if where == "held" else values)[0] = poison
        stream = SparseStream(torch.tensor([3, 11]), values, 15)
        return oktopk_held(stream, held, nothing, [0, 5, 10, 15], Wire(comm), 4)

    for outcome in simulate(3, on_rank).results:
        assert not outcome.total.finite
        assert outcome.total.nnz == 0


def largest(vector, k):
    """Return the k largest coordinates of a vector, and zeros elsewhere."""
    return full(SparseStream(None, vector, vector.numel()).largest(k))


def elsewhere(gradient, k, boundaries, own):
    """Return what a rank sends that selects k, and replaces those of its own region by others."""
    sent = largest(gradient, k)
    region = slice(boundaries[own], boundaries[own + 1])
    replaced = int((sent[region] != 0).sum())
    sent[region] = 0
    left = gradient - sent
    candidates = torch.zeros_like(gradient)
    for rank, (start, stop) in enumerate(pairwise(boundaries)):
        if rank != own:
            most = math.ceil(CROWD * replaced / (len(boundaries) - 2))
            candidates[start:stop] = largest(left[start:stop], most)
    return sent + largest(candidates, replaced)


@given(
    st.integers(1, 90),
    st.lists(st.integers(0, 90), min_size=1, max_size=12),
    st.integers(0, 12),
    st.integers(1, 90),
    st.booleans(),
)
def test_what_a_selection_has_of_a_region_is_replaced_by_others(size, cuts, own, k, ties):
    boundaries = [0, *sorted(min(cut, size) for cut in cuts), size]
    own %= len(boundaries) - 1
    gradient = integers(1, 2, size) if ties else normal(1, 2, size)
    memory = Memory()
    shares = [Share(0, size, selector("exact"), k)]
    selection = memory.select(gradient, shares, 0, 1)
    rest = memory.kept.clone()
    choice = select_elsewhere(memory.kept, selection, shares, boundaries, own)
    assert same_bits(memory.kept, rest)
    assert choice.sent.nnz <= selection.nnz
    assert torch.equal(full(choice.sent), elsewhere(gradient, k, boundaries, own))
    memory.settle([(boundaries[own], choice.unsent)], [choice.instead])
    assert torch.equal(memory.kept, gradient - full(choice.sent))


@pytest.mark.parametrize(
    ("boundaries", "own", "sent"),
    [
        ([0, 90, 100], 1, [*range(27, 40), *range(84, 90)]),
        ([0, 35, 100], 0, [*range(35, 40), *range(94, 100)]),  # no others of these layers
        ([0, 10, 20, 60, 100], 3, [*range(27, 40), *range(54, 60)]),
    ],
)
def test_a_layers_coordinates_are_replaced_by_its_own(boundaries, own, sent):
    memory, layers = Memory(), ((0, 30, 3), (30, 40, 10), (40, 100, 6))
    shares = [Share(start, stop, selector("exact"), k) for start, stop, k in layers]
    selection = memory.select(torch.arange(1.0, 101), shares, 0, 2)
    assert selection.indices.tolist() == [*range(27, 40), *range(94, 100)]
    choice = select_elsewhere(memory.kept, selection, shares, boundaries, own)
    assert choice.sent.indices.tolist() == sent


def test_an_owner_adds_its_region_and_sends_of_the_others():
    """All that is known of a coordinate meets at its owner, and stays there if it loses."""
    world, size, k = 4, 400, 40
    gradients = [normal(rank, 0, size) for rank in range(world)]
    tops = [SparseStream(None, gradient, size).largest(k) for gradient in gradients]
    boundaries, _ = simulate(
        world, lambda comm: balanced_boundaries(tops[comm.rank], comm, k)
    ).results[0]
    regions, sums, kept = list(pairwise(boundaries)), torch.zeros(size), []
    for rank, gradient in enumerate(gradients):
        own = slice(*regions[rank])
        sent = elsewhere(gradient, k, boundaries, rank)
        kept.append(gradient - sent)
        sums += sent
        sums[own] += gradient[own]
    winners = largest(sums, k)

    def on_rank(comm):
        scheme = HeldOkTopK(density=k / size)
        return scheme.step(gradients[comm.rank], comm), scheme.memory

    for rank, (update, memory) in enumerate(simulate(world, on_rank).results):
        torch.testing.assert_close(update, winners / world)
        own = slice(*regions[rank])
        kept[rank][own] = (sums - winners)[own]
        torch.testing.assert_close(memory, kept[rank])


@pytest.mark.parametrize(("size", "held"), [(300, False), (20_000, True)])
def test_owners_hold_only_where_gathering_takes_more(size, held):
    settings = {"oktopk": {}, "auto": {"candidates": ["oktopk"]}}

    def on_rank(comm):
        schemes = [HeldOkTopK(0.1)]
        schemes += [sparcel.scheme(name, density=0.1, **settings[name]) for name in settings]
        return [scheme.step(normal(comm.rank, 0, size), comm) for scheme in schemes]

    of_held, *updates = simulate(4, on_rank).results[0]
    assert all(same_bits(update, of_held) == held for update in updates)


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


def crowded(rank, world, size):
    """Return a gradient that is large in the rank's own region, and less so in the first one."""
    gradient = normal(rank, 0, size) / 1000
    gradient[: size // 20] *= 100
    start = rank * size // world
    gradient[start : start + size // 20] *= 10_000
    return gradient


@pytest.mark.parametrize("world", [3, 8, 13])
def test_owners_receive_few_entries_where_all_replace_what_they_selected(world, monkeypatch):
    """At most 4k + P entries more than the boundaries allow for."""
    size = 50_000
    k = size // 50
    received = torch.zeros(world)
    lock = Lock()

    def count(stream, held, own, boundaries, wire, *rest):
        parts = stream.split(boundaries)
        with lock:
            received.add_(
                torch.tensor([part.nnz * (r != wire.rank) for r, part in enumerate(parts)])
            )
        return oktopk_held(stream, held, own, boundaries, wire, *rest)

    monkeypatch.setattr(schemes_oktopk, "oktopk_held", count)
    simulate(
        world, lambda comm: HeldOkTopK(density=k / size).step(crowded(comm.rank, world, size), comm)
    )
    assert k < int(received.max()) <= k + max(TOLERANCE, world, k // TOLERATED) + 4 * k + world


@pytest.mark.parametrize("scheme", [HeldOkTopK, lambda k: OkTopK(k, put_back="own")])
def test_ranks_that_ask_for_other_counts_are_told(scheme):
    """Layers of other densities, on a vector that is too large to be gathered."""

    def on_rank(comm):
        density = 0.3 if comm.rank == 1 else 0.31
        request = Request(layers=[(0, 20_000, density)])
        scheme(0.1).step(normal(comm.rank, 0, 20_000), comm, request=request)

    with pytest.raises(MismatchError, match=r"k=6000.*k=6200|k=6200.*k=6000"):
        simulate(4, on_rank)


def test_a_void_step_takes_nothing_out_of_memory():
    """All gradients are finite, and the owners' sums are not."""

    def on_rank(comm):
        scheme, request = HeldOkTopK(0.1), Request()
        scheme.step(normal(comm.rank, 0, 100), comm)
        before = scheme.memory.clone()
        scheme.step(normal(0, 0, 100).sign() * 3e38, comm, request=request)
        assert same_bits(scheme.memory, before)
        return scheme.steps, request.meter.magnitude

    assert simulate(4, on_rank).results == [(1, 0.0)] * 4


def test_papers_rule_takes_back_values_on_large_vectors():
    size = 20_000
    gradients = [normal(rank, 0, size) for rank in range(4)]

    def on_rank(comm):
        scheme = OkTopK(0.1, put_back="own")
        return scheme.step(gradients[comm.rank], comm), scheme.memory

    for gradient, (update, memory) in zip(gradients, simulate(4, on_rank).results, strict=True):
        assert torch.equal(memory[update == 0], gradient[update == 0])
