"""``algorithm="auto"``: the cost model's choice, the same on all ranks."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import SparseStream, simulate
from sparcel.core import auto, cost
from sparcel.core.collectives import ALGORITHMS
from sparcel.core.ops import SUM
from sparcel.core.wire import Wire
from sparcel.errors import CommunicationError, InputError
from tests.strategies import CIRCLE, case_of, dense_reference, full

WORLDS = range(1, 18)


@pytest.fixture
def taken(monkeypatch):
    """Record the algorithm that each rank runs."""
    names = []

    def noting(name, algorithm):
        def noted(stream, wire, op, max_nnz):
            names.append(name)
            return algorithm(stream, wire, op, max_nnz)

        return noted

    for name, algorithm in ALGORITHMS.items():
        monkeypatch.setitem(ALGORITHMS, name, noting(name, algorithm))
    return names


def chosen(taken, world, streams, op=SUM, max_nnz=None, rates=None):
    """Return the algorithm that all ranks ran."""
    taken.clear()

    def on_rank(comm):
        comm.rates = rates
        return auto.all_reduce(streams[comm.rank], Wire(comm), op, max_nnz=max_nnz)

    results = simulate(world, on_rank).results
    for result in results:
        assert torch.equal(full(result, op), dense_reference(streams, op))
    assert len(taken) == world
    assert len(set(taken)) == 1
    return taken[0]


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_with_different_counts_choose_the_same_algorithm(taken, world):
    cases = [*product(("uneven", "one rank", "dense", "empty"), (1, 50, 9000))]
    for layout, size in cases[world % 2 :: 2]:  # each meets half of the worlds
        chosen(taken, world, case_of(layout, world, size).streams)


@given(size=st.integers(1, 10**8), k=st.integers(1, 10**8), world=st.integers(2, 64))
def test_auto_chooses_what_the_cost_model_predicts_to_be_fastest(size, k, world):
    k = min(k, size)
    problem = cost.Problem(size, k, world)
    name = auto.fastest(problem, cost.default_rates())
    seconds = {
        other: cost.predict(formula, problem).seconds for other, formula in cost.SUMS.items()
    }
    assert seconds[name] == min(seconds.values())


def one_entry(comm, max_nnz=None):
    """Return how many messages this rank sends in a sum of one entry a rank."""
    stream = SparseStream(torch.tensor([comm.rank]), torch.ones(1), 40)
    total = sparcel.all_reduce(stream, group=comm, max_nnz=max_nnz)
    assert torch.equal(total.to_dense(), torch.arange(40).lt(comm.size).float())
    return comm.traffic.messages_sent


@pytest.mark.parametrize(("world", "messages"), [(8, 7), (9, 4)])
def test_max_nnz_saves_the_exchange_of_counts(world, messages):
    without, with_bound = (
        simulate(world, lambda comm: one_entry(comm, bound)).results  # noqa: B023
        for bound in (None, 1)
    )
    saved = [more - less for more, less in zip(without, with_bound, strict=True)]
    assert saved == [messages] * world


def test_too_small_max_nnz_is_refused():
    def on_rank(comm):
        bound = 0 if comm.rank == 2 else 1
        with pytest.raises((InputError, CommunicationError), match="got 0 for a stream of 1"):
            one_entry(comm, bound)

    simulate(4, on_rank)


def test_rates_of_the_communicator_decide_the_choice(taken):
    streams, names = case_of("random", 8, 40_000, count=4096).streams, []
    for latency in (1.0, 1e-9):
        rates = cost.stated_rates(bandwidth=1e7, latency_s=latency, ranks=8)
        names.append(chosen(taken, 8, streams, max_nnz=4096, rates=rates))
        assert names[-1] == auto.fastest(cost.Problem(40_000, 4096, 8), rates)
    assert names[0] != names[1]


def test_auto_never_gives_the_engine_an_unknown_operation(taken):
    streams = case_of("dense", 8, 60_000, op=CIRCLE).streams
    streams = [SparseStream(None, full(stream, CIRCLE), stream.size) for stream in streams]
    # With these rates, the engine's dense all-reduce would be chosen for a sum.
    rates = cost.stated_rates(bandwidth=1e9, latency_s=1e-4, ranks=8)
    curves = {**rates.curves, "dense.float32": cost.Curve(((1.0, 1e-9),))}
    rates = cost.Rates(curves, 8)
    assert chosen(taken, 8, streams, op=CIRCLE, rates=rates) != "dense"


@given(st.integers(1, 1 << 40))
def test_similar_counts_share_a_cache_entry(count):
    rounded = auto._rounded(count)
    assert count <= rounded <= count * 9 / 8
    assert rounded.bit_length() <= 4 or rounded % (1 << rounded.bit_length() - 5) == 0
