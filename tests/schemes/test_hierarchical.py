"""Two levels: the traffic on each kind of link, the owner of memory, and any inner scheme."""

import sys
from itertools import pairwise
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import simulate
from sparcel.core.collectives.all_reduce import sum_regions
from sparcel.core.schemes import (
    Dense,
    GTopK,
    Hierarchical,
    OkTopK,
    Request,
    ScaleCom,
    SparCML,
    TopK,
)
from sparcel.core.wire import Wire
from sparcel.errors import InputError
from tests.schemes.steps import INTEGERS, copy_of, few_examples, integers, memory_of, normal, total
from tests.strategies import same_bits

# The package has the function of this name.
all_reduce_module = sys.modules["sparcel.core.collectives.all_reduce"]

INNER = {
    "topk": lambda: TopK(0.1, algorithm="allgather"),
    "sparcml 4 bits": lambda: SparCML(0.4, bits=4),
    "gtopk": lambda: GTopK(0.1),
    "oktopk": lambda: OkTopK(0.1),
    "scalecom": lambda: ScaleCom(0.1, beta=0.5),
    "random-k": lambda: TopK(0.2, selector="randomk"),
    "momentum": lambda: TopK(0.1, warmup=[1], warmup_steps=1),
    "dense": Dense,
    "three levels": lambda: Hierarchical(GTopK(0.1), 1),
}
grids = st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 4), (4, 2), (2, 4), (8, 2), (4, 4)])
inners = pytest.mark.parametrize("make", INNER.values(), ids=INNER)


def shards(size, per_node):
    cuts = [place * size // per_node for place in range(per_node + 1)]
    return list(pairwise(cuts))


@inners
@given(grid=grids, size=st.integers(0, 300), gradient=st.sampled_from(INTEGERS))
@few_examples
def test_any_scheme_between_nodes_loses_nothing(make, grid, size, gradient):
    nodes, per_node = grid

    def on_rank(comm):
        scheme = Hierarchical(make(), per_node)
        updates = [scheme.step(gradient(comm.rank, step, size), comm) for step in range(3)]
        return updates, memory_of(scheme)

    results = simulate(nodes * per_node, on_rank).results
    for updates, _ in results:
        assert all(map(same_bits, updates, results[0][0]))
    ranks = nodes * per_node
    came_out = ranks * total(results[0][0]) + total(owed for _, owed in results)
    went_in = total(gradient(rank, step, size) for rank in range(ranks) for step in range(3))
    inexact = isinstance(make(), SparCML)
    torch.testing.assert_close(came_out, went_in, rtol=0, atol=1e-4 if inexact else 0)


@inners
@given(grid=grids, size=st.integers(1, 300))
@few_examples
def test_shard_update_equals_the_inner_scheme_on_the_nodes_sums(make, grid, size):
    """A shard's update equals that of the inner scheme with one rank for each node."""
    nodes, per_node = grid

    def on_rank(comm):
        scheme = Hierarchical(make(), per_node)
        return scheme.step(integers(comm.rank, 0, size), comm), copy_of(scheme.memory)

    results = simulate(nodes * per_node, on_rank).results
    sums = [
        sum(integers(node * per_node + place, 0, size) for place in range(per_node))
        for node in range(nodes)
    ]
    for place, (start, stop) in enumerate(shards(size, per_node)):

        def on_node(comm):
            scheme = make()
            return scheme.step(sums[comm.rank][start:stop].clone(), comm), copy_of(scheme.memory)  # noqa: B023

        for node, (update, memory) in enumerate(simulate(nodes, on_node).results):
            whole, kept = results[node * per_node + place]
            assert torch.equal(whole[start:stop] * per_node, update)
            assert (kept is None) == (memory is None)
            if kept is not None:
                assert torch.equal(kept[start:stop], memory)
                assert not kept[:start].any()
                assert not kept[stop:].any()


def test_a_2d_torus_is_the_dense_average():
    def on_rank(comm):
        return sparcel.scheme("torus2d").step(integers(comm.rank, 0, 101), comm)

    for update in simulate(8, on_rank, ranks_per_node=4).results:
        assert torch.equal(update, (total(integers(r, 0, 101) for r in range(8)) / 8).float())


def test_a_half_precision_torus_sends_averages_of_all_ranks():
    """40000 fits float16; the sum over a node does not."""

    def on_rank(comm):
        return sparcel.scheme("torus2d", wire="float16").step(torch.full((9,), 4e4), comm)

    for update in simulate(8, on_rank, ranks_per_node=4).results:
        torch.testing.assert_close(update, torch.full((9,), 4e4), rtol=1e-2, atol=0)


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["torus2d", "hitopk"])
def test_half_precision_halves_what_travels_dense(name, wire):
    """Inside nodes and across. Sums over a node are float32; in float16, 2048 + 1 is 2048."""
    size, ranks = 4000, 8

    def sent(own):
        def on_rank(comm):
            made = sparcel.scheme(name, wire=own)
            gradient = torch.full((size,), 1.0 if comm.rank % 4 else 2048.0)
            update = made.step(gradient, comm).clone()  # also creates the groups
            before = comm.traffic.bytes_sent
            made.step(gradient, comm)
            return comm.traffic.bytes_sent - before, update

        return simulate(ranks, on_rank, ranks_per_node=4)

    half, whole = sent(wire), sent(None)
    expected = torch.tensor(2 * (2048 + 3) / ranks).to(getattr(torch, wire)).float()
    for (few, update), (many, _) in zip(half.results, whole.results, strict=True):
        dense = many if name == "torus2d" else 4 * size * 3 / 4  # selections are not dense
        assert few <= many - dense / 2 + 40 * ranks
        assert update.dtype == torch.float32
        assert set(update.tolist()) - {0} == {float(expected)}


def test_half_precision_is_added_wide_and_rounded_once():
    """In float16, 2048 + 1 is 2048."""

    def on_rank(comm):
        gradient = torch.full((9,), 1.0 if comm.rank % 4 else 2048.0, dtype=torch.float16)
        return sparcel.scheme("torus2d").step(gradient, comm)

    expected = torch.full((9,), 2 * (2048 + 3) / 8).half()
    for update in simulate(8, on_rank, ranks_per_node=4).results:
        assert torch.equal(update, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_slices_of_regions_make_the_whole_sum(ranks, monkeypatch):
    """Regions of unequal sizes have equally many slices, of which the last may be empty."""
    monkeypatch.setattr(all_reduce_module, "SLICE", 3)
    for size in (1, ranks, 6 * ranks, 6 * ranks + 1, 7 * ranks - 1):
        total = sum(normal(rank, 0, size) for rank in range(ranks))

        def on_rank(comm, size=size):
            return sum_regions(normal(comm.rank, 0, size), Wire(comm), torch.float32, torch.float32)

        report = simulate(ranks, on_rank)
        assert torch.equal(torch.cat(report.results), total)
        slices = ceil(ceil(size / ranks) / 3)
        assert {one.messages_sent for one in report.traffic} == {slices * (ranks - 1)}


def test_clipping_uses_the_average_over_all_ranks():
    def on_rank(comm):
        scheme = Hierarchical(TopK(1, clip=1.0), 4)
        return scheme.step(normal(comm.rank, 0, 10_000), comm).norm()

    for norm in simulate(8, on_rank).results:
        assert 0.9 < norm < 1.1


def test_links_between_nodes_carry_the_shards_selection_only():
    """Between nodes 2(k/g)(m−1) words a rank; inside n(g−1)/g and at most 2mk(g−1)/g."""
    size, nodes, per_node, k = 8000, 4, 5, 80

    def on_rank(comm):
        scheme = sparcel.scheme("hitopk", density=k / size)
        scheme.step(normal(comm.rank, 0, size), comm)  # also creates the groups
        before = comm.traffic.bytes_sent
        scheme.step(normal(comm.rank, 1, size), comm)
        return comm.traffic.bytes_sent - before

    report = simulate(nodes * per_node, on_rank, ranks_per_node=per_node)
    headers = 48 * nodes * per_node
    inside = 4 * size * (per_node - 1) // per_node + 8 * nodes * k * (per_node - 1) // per_node
    between = 8 * (k // per_node) * (nodes - 1)
    for rank, sent in enumerate(report.results):
        assert sent <= inside + between + headers
        crossed = report.between_nodes[rank].bytes_sent
        grid = 2 * 8 * nodes * per_node  # the numbers exchanged to create the groups
        assert crossed <= 2 * (between + 48 * nodes) + grid


@pytest.mark.parametrize("name", ["topk", "momentum", "gtopk", "scalecom"])
@pytest.mark.parametrize("moved", [1, 5])
def test_loaded_memory_reaches_its_shard_on_any_node(name, moved):
    """A state of whole vectors is summed over the node, so nothing that was owed is lost."""

    def on_rank(comm):
        first = Hierarchical(INNER[name](), 4)
        for step in range(2):
            first.step(integers(comm.rank, step, 203), comm)
        owed, state = copy_of(first.memory), first.state_dict()
        state["memory"] = state["memory"].roll(moved)
        second = first.fresh()
        second.load_state_dict(state)
        assert same_bits(second.memory, state["memory"])
        assert same_bits(second.memory, owed.roll(moved))
        update = second.step(torch.zeros(203), comm)
        return owed.roll(moved), update, copy_of(second.memory)

    results = simulate(8, on_rank).results
    came_out = 8 * results[0][1].double() + total(after for *_, after in results)
    assert torch.equal(came_out, total(before for before, *_ in results))


def test_layers_and_withheld_ranges_are_cut_to_the_shard():
    def on_rank(comm):
        scheme = Hierarchical(TopK(0.1), 2)
        layers = [(0, 20, 0.5), (20, 60, 0.05), (60, 100, None)]
        scheme.step(normal(comm.rank, 0, 100), comm, request=Request(layers))
        before = copy_of(scheme.memory)
        gradient = normal(comm.rank, 1, 100)
        gradient[40:70] = 0
        update = scheme.step(gradient, comm, request=Request(layers, withheld=[(40, 70)]))
        assert not update[40:70].any()
        assert torch.equal(scheme.memory[40:70], before[40:70])
        return update[:20].count_nonzero().item()

    assert all(10 <= count <= 20 for count in simulate(4, on_rank).results)


def test_gradient_of_another_rank_of_the_node_lifts_withholding():
    def on_rank(comm):
        scheme = Hierarchical(TopK(1 / 40), 2)
        gradient = torch.zeros(40)
        gradient[3] = comm.rank  # zero on rank 0, which serves the shard
        request = Request(withheld=[(0, 10)] if comm.rank == 0 else [])
        return scheme.step(gradient, comm, request=request)

    for update in simulate(2, on_rank).results:
        assert update[3] == 0.5


def test_uneven_nodes_are_refused_on_all_ranks():
    refused = []

    def on_rank(comm):
        try:
            sparcel.scheme("hitopk", ranks_per_node=3).step(torch.ones(8), comm)
        except InputError as error:
            refused.append(str(error))

    simulate(8, on_rank)
    assert len(refused) == 8
    assert all("nodes must have equally many ranks, got [3, 3, 2]" in text for text in refused)


def test_a_scheme_serves_one_vector_but_a_dense_one_any():
    def on_rank(comm):
        sparse, dense = sparcel.scheme("hitopk"), sparcel.scheme("torus2d")
        for size in (20, 21):
            dense.step(torch.ones(size), comm)
        sparse.step(torch.ones(20), comm)
        with pytest.raises(InputError, match="remembers a vector of 20 coordinates"):
            sparse.step(torch.ones(21), comm)

    simulate(4, on_rank, ranks_per_node=2)
