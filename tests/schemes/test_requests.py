"""Updates that stay streams, and ranges that the driver sends itself."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import simulate
from sparcel.core.memory import wide_dtype
from sparcel.core.schemes import Auto, Costs, Dense, Request, TopK
from tests.schemes.steps import (
    DISTINCT,
    INTEGERS,
    SCHEMES,
    SPARSE,
    copy_of,
    few_examples,
    integers,
    memory_of,
    normal,
    simulate_nodes,
    total,
)
from tests.strategies import FLOATS, same_bits

schemes = pytest.mark.parametrize("make", [SCHEMES[name] for name in DISTINCT], ids=DISTINCT)


@schemes
@given(
    world=st.integers(1, 9),
    size=st.integers(0, 400),
    dtype=st.sampled_from(FLOATS),
    gradient=st.sampled_from([normal, *INTEGERS]),
)
@few_examples
def test_step_stream_equals_step(make, world, size, dtype, gradient):
    def on_rank(comm):
        dense, sparse = make(), make()
        for step in range(2):
            mine = gradient(comm.rank, step, size, dtype)
            stream = sparse.step_stream(mine, comm)
            assert stream.dtype == dtype
            assert same_bits(mine, gradient(comm.rank, step, size, dtype))
            assert same_bits(stream.to_dense(), dense.step(mine, comm))
            assert same_bits(sparse.memory, dense.memory)
        assert sparse.steps == dense.steps == 2

    simulate_nodes(world, on_rank)


@pytest.mark.parametrize("name", SPARSE)
def test_streams_lose_nothing(name):
    def on_rank(comm):
        scheme, updates = SCHEMES[name](), []
        for step in range(3):
            updates.append(scheme.step_stream(integers(comm.rank, step, 300), comm).to_dense())
        return updates, memory_of(scheme)

    results = simulate_nodes(4, on_rank).results
    came_out = 4 * total(results[0][0]) + total(owed for _, owed in results)
    went_in = total(integers(rank, step, 300) for rank in range(4) for step in range(3))
    torch.testing.assert_close(came_out, went_in, rtol=0, atol=1e-4 if "bits" in name else 0)


@schemes
def test_stream_of_a_void_step_is_empty_and_not_finite(make):
    def on_rank(comm):
        scheme = make()
        scheme.step(integers(comm.rank, 0, 200), comm)
        before = copy_of(scheme.memory)
        gradient = integers(comm.rank, 1, 200)
        gradient[3] = float("inf") if comm.rank == 2 else 1
        stream = scheme.step_stream(gradient, comm)
        assert (stream.nnz, stream.finite, stream.size) == (0, False, 200)
        assert same_bits(scheme.memory, before)
        assert scheme.steps == 1

    simulate_nodes(4, on_rank)


@pytest.mark.parametrize("name", ["gtopk", "oktopk", "scalecom"])
def test_a_sparse_update_stays_sparse(name):
    def on_rank(comm):
        return sparcel.scheme(name, density=0.01).step_stream(normal(comm.rank, 0, 2000), comm)

    for stream in simulate(8, on_rank).results:
        assert not stream.is_dense
        assert stream.nnz == 20


@pytest.mark.parametrize("name", SPARSE)
def test_ranges_set_apart_are_left_out_and_keep_their_memory(name):
    apart = [(0, 9), (100, 131)]

    def on_rank(comm):
        scheme, in_place, reference = SCHEMES[name](), SCHEMES[name](), SCHEMES[name]()
        for step in range(2):
            gradient = normal(comm.rank, step, 300)
            without = gradient.clone()
            for start, stop in apart:
                without[start:stop] = 0
            request = Request(apart=apart)
            update = scheme.step(gradient, comm, request=request)
            assert same_bits(gradient, normal(comm.rank, step, 300))
            begun = comm.run(lambda: in_place.begin(gradient, comm, request, in_place=True))  # noqa: B023
            in_place.commit(begun)
            assert same_bits(gradient, update)
            assert same_bits(in_place.memory, scheme.memory)
            if not begun.sent_whole:
                assert same_bits(update, reference.step(without, comm))
                assert same_bits(scheme.memory, reference.memory)
        return begun.sent_whole

    sent_whole = simulate_nodes(4, on_rank).results
    assert set(sent_whole) == {name == "auto dense"}


@pytest.mark.parametrize("name", SPARSE)
@given(dtype=st.sampled_from(FLOATS), scale=st.sampled_from([2.0**11, 2.0**-11]))
@few_examples
def test_memory_holds_what_a_scale_does_not_multiply(name, dtype, scale):
    """Also where half precision holds the scaled gradient, and not the gradient itself."""
    small = 1 / max(scale, 1) ** 2

    def on_rank(comm):
        scaled, wide = SCHEMES[name](), SCHEMES[name]()
        for step in range(3):
            plain = integers(comm.rank, step, 300, wide_dtype(dtype)) * small
            update = scaled.step((plain * scale).to(dtype), comm, request=Request(scale=scale))
            expected = (wide.step(plain, comm) * scale).to(dtype)
            # What "auto dense" sends whole is summed in its own dtype.
            atol = scale * small / 50 if name == "auto dense" else 0
            torch.testing.assert_close(update, expected, rtol=0, atol=atol)
            assert same_bits(scaled.memory, wide.memory)

    simulate_nodes(3, on_rank)


def test_ranges_set_apart_travel_with_a_gradient_sent_whole():
    def on_rank(comm):
        scheme, plain = Auto(candidates=["dense"]), Dense()
        for step in range(3):
            gradient = normal(comm.rank, step, 300)
            update = scheme.step(gradient, comm, request=Request(apart=[(10, 50)]))
            assert same_bits(update, plain.step(gradient, comm))

    simulate(4, on_rank)


def test_what_rounding_gives_back_has_not_left_the_memory():
    """A whole step sends everything, and keeps what rounding took; a void one takes nothing."""

    def on_rank(comm):
        scheme, magnitudes = TopK(1.0, format="raw:4"), []
        gradient = normal(comm.rank, 0, 500)
        for sent in (gradient, gradient * math.nan):
            costs = Costs()
            scheme.step(sent, comm, request=Request(costs=costs))
            magnitudes.append(costs.magnitude)
        return magnitudes, float(gradient.abs().sum() - scheme.memory.abs().sum())

    for (whole, void), left in simulate(2, on_rank).results:
        assert whole == pytest.approx(left, rel=1e-5)
        assert void == 0


def test_withheld_ranges_keep_their_velocity():
    def on_rank(comm):
        scheme = sparcel.scheme("topk", density=0.2, momentum=0.5)
        scheme.step(normal(comm.rank, 0, 100), comm)
        before = scheme.coordinates()["velocity"].clone()
        gradient = normal(comm.rank, 1, 100)
        gradient[:50] = 0
        scheme.step(gradient, comm, request=Request(withheld=[(0, 50)]))
        assert before[:50].any()
        assert torch.equal(scheme.coordinates()["velocity"][:50], before[:50])

    simulate(2, on_rank)
