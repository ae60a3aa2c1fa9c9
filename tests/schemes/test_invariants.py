"""The invariants of docs/explanation/design.md, for every scheme."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import simulate
from sparcel.core.comm import SimulatedCommunicator
from sparcel.core.schemes import Request
from sparcel.errors import CommunicationError, MismatchError
from tests.sampling import meeting
from tests.schemes.steps import (
    DISTINCT,
    EXACT,
    INTEGERS,
    SCHEMES,
    copy_of,
    few_examples,
    integers,
    memory_of,
    normal,
    run,
    simulate_nodes,
    total,
)
from tests.strategies import FLOATS, same_bits

THOROUGH = [name for name in SCHEMES if name not in EXACT or name in DISTINCT]
"""Schemes that round by random numbers, and those that share no path with one another."""


def each(names):
    """Give a test the schemes of these names."""
    return pytest.mark.parametrize("make", [SCHEMES[name] for name in names], ids=names)


schemes = each([*SCHEMES])
# What the base class does for all schemes, and what they keep.
kinds = each([*DISTINCT, "torus2d", "warm-up"])
PLACES = st.integers(0, 1100)
SOME_RANKS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])


def sampled(names, *axes, meets):
    """Let each scheme meet some combinations of the values on the axes."""
    given = [(name, *rest) for name, rest in meeting(SCHEMES, product(*axes), meets)]
    values = [(SCHEMES[name], *rest) for name, *rest in given]
    ids = ["-".join(map(str, one)) for one in given]
    return pytest.mark.parametrize(f"make, {names}", values, ids=ids)


def culprits(worlds):
    """Return all pairs of a world and a rank of it."""
    return [(world, rank) for world in worlds for rank in range(world)]


POISONS = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("name", SCHEMES)
@given(
    world=SOME_RANKS,
    size=PLACES,
    dtype=st.sampled_from(FLOATS),
    gradient=st.sampled_from([normal, *INTEGERS]),
)
@few_examples
def test_all_ranks_hold_the_same_bits_and_reruns_repeat_them(name, world, size, dtype, gradient):
    make = SCHEMES[name]
    updates, memories = run(make, world, 2, size, gradient, dtype)
    for step in range(2):
        first = updates[0][step]
        assert (first.shape, first.dtype) == ((size,), dtype)
        assert all(same_bits(by_step[step], first) for by_step in updates)
    if name in THOROUGH:
        again, memories_again = run(make, world, 2, size, gradient, dtype)
        assert all(map(same_bits, updates[0], again[0]))
        for before, after in zip(memories, memories_again, strict=True):
            assert all(map(same_bits, before, after))


@pytest.mark.parametrize("name", EXACT)
@given(
    world=st.sampled_from([1, 2, 4, 8]),
    size=PLACES,
    dtype=st.sampled_from(FLOATS),
    steps=st.integers(1, 4),
    gradient=st.sampled_from(INTEGERS),
)
@few_examples
def test_nothing_is_lost_exactly(name, world, size, dtype, steps, gradient):
    updates, memories = run(SCHEMES[name], world, steps, size, gradient, dtype, memory_of)
    went_in = total(gradient(rank, step, size) for rank in range(world) for step in range(steps))
    came_out = world * total(updates[0])
    assert torch.equal(came_out + total(memory[-1] for memory in memories), went_in)


@each(THOROUGH)
@given(world=SOME_RANKS, size=PLACES, dtype=st.sampled_from([torch.float32, torch.float64]))
@few_examples
def test_nothing_is_lost_except_by_rounding(make, world, size, dtype):
    updates, memories = run(make, world, 3, size, normal, dtype, memory_of)
    went_in = total(normal(rank, step, size, dtype) for rank in range(world) for step in range(3))
    kept = total(memory[-1] for memory in memories)
    torch.testing.assert_close(world * total(updates[0]) + kept, went_in, rtol=0, atol=1e-4)


@sampled("place", culprits([1, 2, 3, 5, 8]), meets=1)
def test_no_poison(make, place):
    world, culprit = place
    clean_updates, clean_memories = run(make, world, 2, 300)

    def on_rank(comm):
        scheme = make()
        scheme.step(integers(comm.rank, 0, 300), comm)
        before, state = copy_of(scheme.memory), scheme.steps
        gradient = integers(comm.rank, 1, 300)
        if comm.rank == culprit:
            gradient[77] = POISONS[(world + culprit) % 3]
        update = scheme.step(gradient, comm)
        assert bool(update.isnan().all())
        assert same_bits(scheme.memory, before)
        assert scheme.steps == state
        return scheme.step(integers(comm.rank, 1, 300), comm), copy_of(scheme.memory)

    for rank, (update, memory) in enumerate(simulate_nodes(world, on_rank).results):
        assert same_bits(update, clean_updates[rank][1])
        assert same_bits(memory, clean_memories[rank][1])


LARGE = {torch.float32: 3e38, torch.float64: 1.5e308, torch.float16: 6e4}


@sampled("world, dtype", [2, 3, 8], LARGE, meets=1)
def test_sums_that_overflow_change_no_memory(make, world, dtype):
    """Each gradient is finite, their sum (after a few steps of being kept back) is not."""

    def on_rank(comm):
        scheme, outcomes = make(), []
        for step in range(2):
            before, steps = copy_of(scheme.memory), scheme.steps
            gradient = normal(0, step, 40, dtype).sign() * LARGE[dtype]
            update = scheme.step(gradient, comm)
            outcomes.append(update)
            took_effect = scheme.steps > steps
            assert took_effect == bool(update.isfinite().all())
            assert took_effect or bool(update.isnan().all())
            assert took_effect or same_bits(scheme.memory, before)
            assert scheme.memory is None or bool(scheme.memory.isfinite().all())
        return outcomes

    results = simulate_nodes(world, on_rank).results
    for outcomes in results:
        assert all(map(same_bits, outcomes, results[0]))


class DiskError(Exception):
    pass


@sampled("place", culprits([2, 3, 4, 5]), meets=1)
def test_a_failed_step_leaves_memory_as_it_was(make, place, monkeypatch):
    """A rank fails in any exchange of its second step; the others may still be in their first."""
    world, culprit = place
    clean = run(make, world, 2, 300)[1]
    schemes, exchange = {}, SimulatedCommunicator.exchange_parts
    for call in range(3 * world + 9):
        calls = iter(range(10**6))

        def failing(self, *args):
            """Count the culprit's exchanges, on its communicator and on all split from it."""
            me = self.members[self.rank]
            if me == culprit and schemes[me].steps == 1 and next(calls) == call:  # noqa: B023
                raise DiskError("the disk is full")
            return exchange(self, *args)

        monkeypatch.setattr(SimulatedCommunicator, "exchange_parts", failing)

        def on_rank(comm):
            schemes[comm.rank] = scheme = make()
            for step in range(2):
                gradient = integers(comm.rank, step, 300)
                try:
                    scheme.step(gradient, comm)
                except (DiskError, CommunicationError) as error:
                    before = clean[comm.rank][step - 1] if step else None
                    assert same_bits(scheme.memory, before)
                    assert scheme.steps == step
                    assert same_bits(gradient, integers(comm.rank, step, 300))
                    return str(error)
                assert same_bits(scheme.memory, clean[comm.rank][step])
            return None

        results = simulate_nodes(world, on_rank).results
        if results[culprit] is None:
            break  # it needed fewer exchanges than that
        assert results[culprit] == "the disk is full"
        others = set(results) - {None, "the disk is full"}
        assert others <= {f"rank {culprit} failed: the disk is full"}
    assert call > 0


@sampled("world", [2, 3, 8], meets=1)
def test_a_failed_first_step_leaves_nothing_behind(make, world):
    schemes = [make() for _ in range(world)]

    def sizes_differ(comm):
        schemes[comm.rank].step(integers(0, 0, 300 + (comm.rank == 1)), comm)

    with pytest.raises((MismatchError, CommunicationError)):
        simulate_nodes(world, sizes_differ)
    assert all(scheme.memory is None for scheme in schemes)
    results = simulate_nodes(
        world, lambda comm: schemes[comm.rank].step(integers(comm.rank, 0, 77), comm)
    ).results
    assert all(map(same_bits, results, [updates[0] for updates in run(make, world, 1, 77)[0]]))


@kinds
@given(world=st.integers(1, 6), size=PLACES, dtype=st.sampled_from(FLOATS))
@few_examples
def test_gradient_is_unchanged_and_out_holds_the_update(make, world, size, dtype):
    def on_rank(comm):
        gradient = integers(comm.rank, 0, size, dtype)
        before = gradient.clone()
        update = make().step(gradient, comm)
        assert same_bits(gradient, before)
        assert update.data_ptr() != gradient.data_ptr() or size == 0
        out = torch.full_like(gradient, float("nan"))
        assert make().step(gradient, comm, out) is out
        assert same_bits(out, update)
        aliased = gradient.clone()
        assert make().step(aliased, comm, aliased) is aliased
        assert same_bits(aliased, update)
        assert make().step(gradient, comm, in_place=True) is gradient
        assert same_bits(gradient, update)

    simulate_nodes(world, on_rank)


@kinds
@given(world=st.integers(1, 5), size=PLACES)
@few_examples
def test_run_continues_from_its_state(make, world, size):
    def on_rank(comm):
        scheme = make()
        for step in range(2):
            scheme.step(normal(comm.rank, step, size), comm)
        resumed = make()
        resumed.load_state_dict(scheme.state_dict())
        first = [scheme.step(normal(comm.rank, step, size), comm) for step in (2, 3)]
        second = [resumed.step(normal(comm.rank, step, size), comm) for step in (2, 3)]
        assert all(map(same_bits, first, second))
        assert same_bits(scheme.memory, resumed.memory)
        assert resumed.steps == scheme.steps == 4

    simulate_nodes(world, on_rank)


@kinds
def test_a_fresh_scheme_has_the_settings_and_no_memory(make):
    def on_rank(comm):
        scheme = make()
        scheme.step(normal(comm.rank, 0, 200), comm)
        fresh = scheme.fresh()
        assert repr(fresh) == repr(scheme)
        assert fresh.memory is None
        assert fresh.steps == 0
        return fresh.step(normal(comm.rank, 0, 200), comm)

    expected = run(make, 3, 1, 200, normal)[0]
    for rank, update in enumerate(simulate_nodes(3, on_rank).results):
        assert same_bits(update, expected[rank][0])


@schemes
def test_costs_count_coordinates(make):
    def on_rank(comm):
        scheme, request = make(), Request()
        for step in range(3):
            scheme.step(integers(comm.rank, step, 400), comm, request=request)
        return request.costs

    for costs in simulate(4, on_rank).results:
        assert costs.coordinates == 1200
        assert 0 < costs.selected <= 1200
        assert 0 < costs.reduced <= 1200
        assert costs.communicate_seconds > 0
