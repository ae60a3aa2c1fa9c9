"""Momentum correction, clipping, warm-up densities, layers, and the low-pass filter."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel.core.schemes import Costs, Hierarchical, Request
from sparcel.errors import InputError
from tests.schemes.steps import (
    INTEGERS,
    SPARSE,
    copy_of,
    few_examples,
    integers,
    normal,
    run,
    simulate_nodes,
    total,
)
from tests.strategies import same_bits

WITH_MOMENTUM = {
    name: partial(sparcel.scheme, name, density=0.1, momentum=0.5)
    for name in ("bidirectional", "topk", "gtopk", "oktopk", "scalecom", "dgc")
}

# An owner returns sums of which this rank may have sent nothing, and keeps what others have sent.
RULED = {name: make for name, make in WITH_MOMENTUM.items() if name != "bidirectional"}


@given(size=st.integers(1, 200), steps=st.integers(1, 5), gradient=st.sampled_from(INTEGERS))
def test_momentum_correction_equals_dgcs_rule(size, steps, gradient):
    """u = m·u + g; v = v + u; send the top of v; clear u and v there."""
    updates, memories = run(
        lambda: sparcel.scheme("topk", density=0.1, momentum=0.5), 1, steps, size, gradient
    )
    u, v, k = torch.zeros(size), torch.zeros(size), max(1, -(-size // 10))
    for step in range(steps):
        u = 0.5 * u + gradient(0, step, size)
        v = v + u
        sent = sparcel.topk(v, k)
        assert torch.equal(updates[0][step], sent.to_dense())
        u[sent.indices], v[sent.indices] = 0, 0
        assert torch.equal(memories[0][step], v)


@pytest.mark.parametrize("name", WITH_MOMENTUM)
@given(
    world=st.sampled_from([1, 2, 4, 8]),
    size=st.integers(1, 300),
    gradient=st.sampled_from(INTEGERS),
)
@few_examples
def test_corrected_gradients_are_conserved(name, world, size, gradient):
    def on_rank(comm):
        scheme, entered, updates = WITH_MOMENTUM[name](), torch.zeros(size), torch.zeros(size)
        for step in range(3):
            velocity = scheme.coordinates().get("velocity", torch.zeros(size))
            entered += 0.5 * velocity + gradient(comm.rank, step, size)
            updates += scheme.step(gradient(comm.rank, step, size), comm)
        return entered, updates, copy_of(scheme.memory)

    results = simulate_nodes(world, on_rank).results
    came_out = world * results[0][1].double() + total(owed for _, _, owed in results)
    assert torch.equal(came_out, total(entered for entered, _, _ in results))


@pytest.mark.parametrize("name", RULED)
def test_velocity_is_cleared_only_at_updated_coordinates(name):
    def on_rank(comm):
        scheme = WITH_MOMENTUM[name]()
        for step in range(3):
            before = scheme.coordinates().get("velocity", torch.zeros(200))
            expected = 0.5 * before + normal(comm.rank, step, 200)
            update = scheme.step(normal(comm.rank, step, 200), comm)
            after = scheme.coordinates()["velocity"]
            cleared = (after == 0) & (expected != 0)
            assert bool((update[cleared] != 0).all())
            assert bool(cleared.any())
            assert torch.equal(after[~cleared], expected[~cleared])

    simulate_nodes(4, on_rank)


@pytest.mark.parametrize("name", WITH_MOMENTUM)
def test_a_vector_that_is_not_finite_changes_no_velocity(name):
    def on_rank(comm):
        scheme = WITH_MOMENTUM[name]()
        scheme.step(integers(comm.rank, 0, 90), comm)
        before = {kind: part.clone() for kind, part in scheme.coordinates().items()}
        gradient = integers(comm.rank, 1, 90)
        gradient[3] = float("inf") if comm.rank == 1 else 0
        assert scheme.step(gradient, comm).isnan().all()
        after = scheme.coordinates()
        assert after.keys() == before.keys() == {"memory", "velocity"}
        assert all(same_bits(after[kind], before[kind]) for kind in before)

    simulate_nodes(4, on_rank)


@given(st.integers(1, 9), st.floats(0.01, 100), st.integers(0, 20))
def test_a_long_gradient_enters_with_its_share_of_the_norm(world, clip, seed):
    def on_rank(comm):
        scheme = sparcel.scheme("topk", density=0.1, clip=clip)
        gradient = normal(comm.rank, seed, 100)
        update = scheme.step(gradient, comm)
        factor = min(1.0, clip * world**0.5 / float(gradient.double().norm()))
        return gradient.double() * factor, update, copy_of(scheme.memory)

    results = simulate_nodes(world, on_rank).results
    came_out = world * results[0][1].double() + total(memory for _, _, memory in results)
    entered = total(entered for entered, _, _ in results)
    torch.testing.assert_close(came_out, entered, rtol=0, atol=1e-4)


def test_a_gradient_whose_squares_overflow_is_clipped():
    def on_rank(comm):
        scheme = sparcel.scheme("topk", density=0.5, clip=2.0)
        return scheme.step(torch.tensor([3e200, 4e200], dtype=torch.float64), comm)

    (update,) = simulate_nodes(1, on_rank).results
    assert update.tolist() == pytest.approx([0, 1.6])


@pytest.mark.parametrize("name", ["topk", "sparcml", "gtopk", "oktopk", "scalecom", "hitopk"])
def test_warmup_densities_each_serve_their_steps(name):
    """Each density serves its number of steps; void steps do not count."""

    def on_rank(comm):
        scheme, asked = sparcel.scheme(name, density=0.01, warmup=[1, 0.25], warmup_steps=2), []
        for step in range(7):
            costs = Costs()
            gradient = integers(comm.rank, step, 1000)
            if step == 1:
                gradient[0] = float("nan")
            scheme.step(gradient, comm, request=Request(costs=costs))
            asked.append(costs.asked)
        return asked

    for asked in simulate_nodes(1, on_rank).results:
        assert asked == [1000, 1000, 1000, 250, 250, 10, 10]


def test_uncompressed_step_applies_everything_owed():
    updates, memories = run(
        lambda: sparcel.scheme("gtopk", density=0.01, warmup=[0.01, 1], warmup_steps=1), 4, 2, 300
    )
    assert total(memory[0] for memory in memories).any()
    assert not total(memory[1] for memory in memories).any()
    went_in = total(integers(rank, step, 300) for rank in range(4) for step in range(2))
    assert torch.equal(4 * total(updates[0]), went_in)


@pytest.mark.parametrize("selector", ["exact", "bucketed", "reuse"])
def test_layers_have_densities_of_their_own(selector):
    layers = [(0, 100, 0.5), (100, 400, 0.01), (400, 1000, None)]

    def on_rank(comm):
        scheme = sparcel.scheme("topk", density=0.1, selector=selector)
        gradient = normal(comm.rank, 0, 1000)
        update = scheme.step(gradient, comm, request=Request(layers))
        return [update[start:stop].count_nonzero().item() for start, stop, _ in layers]

    assert simulate_nodes(1, on_rank).results == [[50, 3, {"bucketed": 102}.get(selector, 60)]]


@pytest.mark.parametrize("name", SPARSE)
def test_layers_lose_nothing(name):
    from tests.schemes.steps import SCHEMES

    layers = [(0, 7, 0.5), (7, 160, 0.02), (160, 400, None)]

    def on_rank(comm):
        scheme, updates = SCHEMES[name](), torch.zeros(400)
        for step in range(3):
            gradient = integers(comm.rank, step, 400)
            updates += scheme.step(gradient, comm, request=Request(layers))
        return updates, copy_of(scheme.memory)

    results = simulate_nodes(4, on_rank).results
    came_out = 4 * results[0][0].double() + total(owed for _, owed in results)
    went_in = total(integers(rank, step, 400) for rank in range(4) for step in range(3))
    torch.testing.assert_close(came_out, went_in, rtol=0, atol=1e-4 if "bits" in name else 0)


@given(
    st.floats(0.01, 1, exclude_max=True),
    st.integers(1, 100),
    st.integers(1, 5),
    st.sampled_from(["owed", "memory"]),
)
def test_filter_equals_scalecoms_rule(beta, size, steps, switch):
    """m' = (1−β)·m + β·(m + g − sent); memory is m/β, or m from the paper's switch on."""
    settings = {"density": 0.2, "beta": beta, "beta_steps": 3, "beta_switch": switch}
    updates, memories = run(
        lambda: sparcel.scheme("scalecom", **settings), *(1, steps, size, normal)
    )
    m = torch.zeros(size)
    for step in range(steps):
        now = beta if step < 3 else 1.0
        m = (1 - now) * m + now * (m + normal(0, step, size) - updates[0][step])
        if step == 2 and switch == "owed":
            m = m / beta
        owed = m / beta if step < 2 else m
        torch.testing.assert_close(memories[0][step], owed, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_papers_switch_multiplies_what_is_owed(world, nodes):
    """Over the steps at and after the switch, Σ owed + P·update = Σ β·owed(before) + gradients."""

    def after(steps, **settings):
        def make():
            scheme = sparcel.scheme("scalecom", density=0.1, beta=0.5, **settings)
            return Hierarchical(scheme, 1) if nodes else scheme

        updates, memories = run(make, world, steps, 300)
        return total(updates[0]), total(m[-1] for m in memories)

    unswitched, owed_before = after(2)
    switched, owed_at_switch = after(2, beta_steps=2, beta_switch="memory")
    assert torch.equal(switched, unswitched)
    assert torch.equal(owed_at_switch, 0.5 * owed_before)

    came_out, owed = after(4, beta_steps=2, beta_switch="memory")
    went_in = total(integers(rank, step, 300) for rank in range(world) for step in (2, 3))
    assert torch.equal(owed + world * (came_out - switched), owed_at_switch + went_in)
    assert torch.equal(after(2, beta_steps=2)[1], owed_before)


RESUMED = {
    "momentum": partial(sparcel.scheme, "gtopk", density=0.05, momentum=0.9, clip=3.0),
    "filter": partial(sparcel.scheme, "scalecom", density=0.05, beta=0.3, beta_steps=4),
    "paper's filter": partial(
        *(sparcel.scheme, "scalecom"), density=0.05, beta=0.3, beta_steps=3, beta_switch="memory"
    ),
    "warm-up": partial(sparcel.scheme, "topk", density=0.05, warmup=[0.5, 0.2], warmup_steps=2),
    "reuse": partial(sparcel.scheme, "oktopk", density=0.05, threshold="reuse"),
    "local reuse": partial(sparcel.scheme, "topk", density=0.05, selector="reuse"),
    "random": partial(sparcel.scheme, "topk", density=0.05, selector="randomk"),
    "hierarchical": partial(sparcel.scheme, "hitopk", density=0.05, warmup=[0.5], warmup_steps=2),
}


@pytest.mark.parametrize("make", RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("world", [1, 4])
def test_state_holds_everything_that_the_next_steps_need(make, world):
    def on_rank(comm):
        scheme = make()
        for step in range(3):
            scheme.step(normal(comm.rank, step, 400), comm)
        resumed = scheme.fresh()
        state = scheme.state_dict()
        resumed.load_state_dict(state)
        assert same_bits(resumed.memory, scheme.memory)
        loaded = copy_of(state["memory"])
        for step in range(3, 7):
            gradient = normal(comm.rank, step, 400)
            assert same_bits(scheme.step(gradient, comm), resumed.step(gradient, comm))
            assert same_bits(scheme.memory, resumed.memory)
        assert same_bits(state["memory"], loaded)  # it was copied

    simulate_nodes(world, on_rank)


@pytest.mark.parametrize("nodes", [False, True])
def test_a_state_of_another_filter_owes_the_same(nodes):
    def make(**settings):
        scheme = sparcel.scheme("scalecom", density=0.05, **settings)
        return Hierarchical(scheme, 1) if nodes else scheme

    def on_rank(comm):
        scheme = make(beta=0.25)
        for step in range(2):
            scheme.step(integers(comm.rank, step, 400), comm)
        state, owed = scheme.state_dict(), copy_of(scheme.memory)
        of_0_1_0 = state | {"memory": state["memory"] / 4, "beta": 0.25}  # it saved β times that
        outcomes = []
        for settings in ({}, {"beta": 0.5, "beta_steps": 1}, {"beta": 0.5}):
            for held in (state, of_0_1_0):
                other = make(**settings)
                other.load_state_dict(held)
                assert torch.equal(other.memory, owed)
                again = make(**settings)
                again.load_state_dict(other.state_dict())
                assert torch.equal(again.memory, owed)
                update = other.step(torch.zeros(400), comm)
                outcomes.append((owed, update, copy_of(other.memory)))
        return outcomes

    for ranks in zip(*simulate_nodes(4, on_rank).results, strict=True):
        came_out = 4 * ranks[0][1].double() + total(after for *_, after in ranks)
        assert torch.equal(came_out, total(before for before, *_ in ranks))


def test_layers_change_nothing_of_an_uncompressed_warm_up():
    def on_rank(comm):
        updates = []
        for layers in ([], [(0, 50, None), (50, 100, 0.5)]):
            scheme = sparcel.scheme("topk", momentum=0.5, warmup=[1], warmup_steps=4)
            request = Request(layers)
            steps = [scheme.step(torch.ones(100), comm, request=request) for _ in range(4)]
            updates.append([update[60].item() for update in steps])
        return updates

    plain, layered = simulate_nodes(2, on_rank).results[0]
    assert plain == layered == [1, 1.5, 1.75, 1.875]


def test_reused_thresholds_follow_the_warm_up():
    """The update's count matches the density in every step that changes the density."""

    def on_rank(comm):
        scheme = sparcel.scheme(
            "oktopk", density=0.01, threshold="reuse", warmup=[0.25, 0.05], warmup_steps=5
        )
        counts = []
        for step in range(15):
            costs = Costs()
            scheme.step(normal(comm.rank, step, 2000), comm, request=Request(costs=costs))
            counts.append(costs.reduced)
        return counts

    counts = simulate_nodes(4, on_rank).results[0]
    assert [counts[step] for step in (0, 5, 10)] == [500, 100, 20]


BAD = [
    ({"warmup": 0.25, "warmup_steps": 5}, r"warmup must be a list of densities, got 0.25"),
    ({"warmup": [0.25], "warmup_steps": 2.5}, r"warmup_steps must be a whole number, got 2.5"),
    ({"momentum": 1}, r"momentum must lie in \[0, 1\), got 1"),
    ({"clip": 0}, r"clip must be more than 0, got 0; None clips nothing"),
    ({"warmup_steps": 10}, r"warmup_steps=10 needs warmup"),
    ({"warmup": [0.25, 0.1]}, r"needs warmup_steps.*warmup_steps=len\(loader\)"),
    (
        {"warmup": [25], "warmup_steps": 1},
        r"warmup\[0\] .*got 25; for a percentage",
    ),
    ({"selector": "topp"}, r"selector cannot be 'topp'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[str(bad[0]) for bad in BAD])
def test_errors_name_bad_settings_and_the_fix(settings, message):
    with pytest.raises(InputError, match=message):
        sparcel.scheme("topk", **settings)


def test_a_filter_is_a_share():
    with pytest.raises(InputError, match=r"beta must lie in \(0, 1\], got 0; 1 filters nothing"):
        sparcel.scheme("scalecom", beta=0)
