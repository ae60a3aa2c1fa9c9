"""Switching the scheme of a running exchange: nothing that memory owes is lost."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import (
    Auto,
    Bidirectional,
    Dense,
    GTopK,
    Hierarchical,
    OkTopK,
    ScaleCom,
    Scheme,
    TopK,
)
from sparcel.core.training import Averager, Scope
from sparcel.core.training.residuals import FLUSH_STEPS
from sparcel.errors import CommunicationError, InputError, MismatchError
from tests.evenly import even_averager
from tests.sampling import meeting
from tests.strategies import same_bits
from tests.training.tensors import SCOPES, TENSORS, Named, gradients_of, owed_by

DENSE: dict[str, Callable[[], Scheme]] = {
    "dense": Dense,
    "torus2d": lambda: Hierarchical(Dense()),
}
SPARSE: dict[str, Callable[[], Scheme]] = {
    "bidirectional": lambda: Bidirectional(0.05),
    "topk": lambda: TopK(0.05),
    "gtopk": lambda: GTopK(0.02),
    "oktopk": lambda: OkTopK(0.05),
    "filtered": lambda: ScaleCom(0.05, beta=0.25, beta_steps=4),
    "filtered from now": lambda: ScaleCom(0.05, beta=0.5, beta_steps=10, beta_switch="memory"),
    "auto": lambda: Auto(0.05),
    "hitopk": lambda: Hierarchical(TopK(0.05)),
    "filtered between nodes": lambda: Hierarchical(ScaleCom(0.05, beta=0.5)),
}
SCHEMES = DENSE | SPARSE
KEEP_OTHERS = ("bidirectional", "gtopk", "oktopk")
"""Under these a rank may keep more than it sent, and the age of its memory is not known."""
WORLDS = [(1, 1), (2, 1), (3, 1), (4, 2)]
"""Numbers of ranks, of all and of a node."""

names = st.sampled_from(sorted(SCHEMES))
steps = st.lists(st.one_of(st.none(), names, st.just("void")), min_size=2, max_size=7)
"""What happens before or in each step: nothing, a switch to a scheme, or NaN in a gradient."""


def poisoned(gradients: Named) -> Named:
    spoilt = gradients["first"].clone()
    spoilt[3, 4] = math.nan
    return {**gradients, "first": spoilt}


def total(parts: Sequence[Named], name: str) -> Tensor:
    nothing = torch.zeros(TENSORS[name].numel(), dtype=torch.float64)
    return sum((part[name].double().flatten() for part in parts if name in part), nothing)


def assert_conserved(
    before: list[Named], gradients: list[Named], update: Named, after: Any
) -> None:
    """Σ owed(after) + P·update = Σ (owed(before) + gradient)."""
    for name in TENSORS:
        went_in = total(before, name) + total(gradients, name)
        came_out = total(after, name) + len(gradients) * update[name].double().flatten()
        assert torch.allclose(came_out, went_in, rtol=1e-5, atol=1e-3), name


@settings(max_examples=40)
@given(
    first=names,
    happening=steps,
    world=st.sampled_from(WORLDS),
    scope=st.sampled_from(SCOPES),
    scale=st.sampled_from([None, 2.0**10]),
)
def test_nothing_is_lost_in_any_step(
    first: str,
    happening: list[str | None],
    world: tuple[int, int],
    scope: Scope,
    scale: float | None,
) -> None:
    """With several vectors, small tensors, void steps and a GradScaler."""
    factor = scale or 1.0
    scaler = None if scale is None else torch.amp.GradScaler("cpu", scale)
    if scaler is not None:
        scaler.scale(torch.ones(1))  # it asks for its scale when it first scales

    def on_rank(comm: Communicator) -> list[tuple[Named, Named, Named]]:
        averager = even_averager(TENSORS, SCHEMES[first](), group=comm, scope=scope, scaler=scaler)
        seen = []
        for step, what in enumerate([None, None, *happening]):
            if what in SCHEMES:
                averager.handle.switch(SCHEMES[what]())
            before = owed_by(averager, comm.rank)
            gradients = gradients_of(comm.rank, step)
            void = what == "void" and comm.rank == comm.size - 1
            given = poisoned(gradients) if void else gradients
            update = averager.average({name: factor * one for name, one in given.items()})
            update = {name: one / factor for name, one in update.items()}
            seen.append((before, update, owed_by(averager, comm.rank)))
        return seen

    ranks, per_node = world
    results = simulate(ranks, on_rank, ranks_per_node=per_node).results
    for step, what in enumerate([None, None, *happening]):
        befores, updates, afters = map(list, zip(*(seen[step] for seen in results), strict=True))
        assert all(same_bits(one[name], updates[0][name]) for one in updates for name in TENSORS), (
            "ranks parted"
        )
        if what == "void":
            for before, update, after in zip(befores, updates, afters, strict=True):
                assert all(part.isnan().all() for part in update.values())
                assert before.keys() == after.keys()
                assert all(same_bits(before[name], after[name]) for name in before)
        else:
            gradients = [gradients_of(rank, step) for rank in range(ranks)]
            assert_conserved(befores, gradients, updates[0], afters)


def magnitude_owed(averager: Averager, rank: int) -> float:
    return sum(float(part.abs().sum()) for part in owed_by(averager, rank).values())


@pytest.mark.parametrize(("first", "last"), meeting(SPARSE, DENSE, each=1))
def test_a_switch_to_dense_flushes_all_and_frees_the_memory(first: str, last: str) -> None:
    def on_rank(comm: Communicator) -> tuple[float, float]:
        averager = even_averager(TENSORS, SPARSE[first](), group=comm)
        for step in range(3):
            averager.average(gradients_of(comm.rank, step))
        vectors = {
            id(one): one for one, _ in averager._session.residuals._vectors.values()
        }.values()
        held = [weakref.ref(one.scheme) for one in vectors]
        del vectors
        owed, age = magnitude_owed(averager, comm.rank), averager.handle.memory_age()
        averager.handle.switch(DENSE[last]())
        assert averager.handle.sparse == frozenset()
        assert averager.handle.stats().flushed == 0
        assert magnitude_owed(averager, comm.rank) == pytest.approx(owed)
        assert age > 0 or not owed or (math.isnan(age) and first in KEEP_OTHERS)
        for step in range(FLUSH_STEPS):
            assert not owed or "flushes" in repr(averager.handle)
            averager.average(gradients_of(comm.rank, step))
        assert not [ref for ref in held if ref() is not None]
        assert not averager._session.residuals.flush.owed
        assert not averager._session.residuals._loaded
        assert averager.handle.memory_norm() == 0
        assert averager.handle.memory_age() == 0
        assert averager.handle.state_dict().keys() == {"steps", "world_size", "flush"}
        assert "flushes" not in repr(averager.handle)
        averager.average(gradients_of(comm.rank, 0))
        assert averager.handle.stats().last.flushed == 0
        return owed, averager.handle.stats().flushed

    for owed, flushed in simulate(4, on_rank, ranks_per_node=2).results:
        assert flushed == pytest.approx(owed, rel=1e-5)


def switched(comm: Communicator, *schemes: Scheme, steps: int = 2, **settings: Any) -> Averager:
    """Return an averager that has done some steps with each scheme."""
    averager = even_averager(TENSORS, schemes[0], group=comm, **settings)
    for place, scheme in enumerate(schemes):
        if place:
            averager.handle.switch(scheme)
        for step in range(steps):
            averager.average(gradients_of(comm.rank, place + step))
    return averager


def assert_same_future(one: Averager, other: Averager, rank: int) -> None:
    for step in range(FLUSH_STEPS + 1):
        expected, updates = (each.average(gradients_of(rank, step)) for each in (one, other))
        assert all(same_bits(updates[name], expected[name]) for name in TENSORS)
    mine, theirs = one.handle.state_dict(), other.handle.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(same_bits(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize(
    ("first", "last", "through", "scope"),
    [
        ("topk", "dense", "dense", "bucket"),
        ("topk", "torus2d", "topk", "model"),
        ("hitopk", "torus2d", "dense", "bucket"),
        ("hitopk", "dense", "topk", "model"),
        ("filtered", "dense", "topk", "bucket"),
        ("filtered", "torus2d", "dense", "model"),
    ],
)
def test_a_checkpoint_in_the_middle_of_a_flush_resumes_bit_by_bit(
    first: str, last: str, through: str, scope: Scope
) -> None:
    """Also by way of a scheme with memory that is switched, as DCP needs it."""

    def on_rank(comm: Communicator) -> None:
        averager = switched(comm, SPARSE[first](), DENSE[last](), scope=scope)
        own, full = averager.handle.state_dict(), averager.handle.full_state_dict()
        assert 0 < int(own["flush"]) < FLUSH_STEPS or FLUSH_STEPS <= 2
        for key, part in full.items():
            assert not key.startswith("rank0.") or same_bits(part, own[key])
        resumed = even_averager(TENSORS, SCHEMES[through](), group=comm, scope=scope)
        resumed.handle.load_state_dict(own)
        assert owed_by(resumed, comm.rank).keys() == owed_by(averager, comm.rank).keys()
        if through != last:
            resumed.handle.switch(DENSE[last]())
        assert_same_future(averager, resumed, comm.rank)

    simulate(4, on_rank, ranks_per_node=2)


@pytest.mark.parametrize(("first", "last"), meeting(SPARSE, reversed(DENSE), each=1))
def test_loading_a_checkpoint_for_another_scheme_is_a_switch(first: str, last: str) -> None:
    def on_rank(comm: Communicator) -> None:
        averager = switched(comm, SPARSE[first]())
        loaded = even_averager(TENSORS, DENSE[last](), group=comm)
        loaded.handle.load_state_dict(averager.handle.state_dict())
        averager.handle.switch(DENSE[last]())
        assert_same_future(averager, loaded, comm.rank)

    simulate(4, on_rank, ranks_per_node=2)


def test_a_state_that_owes_nothing_is_loaded_for_any_scheme() -> None:
    def on_rank(comm: Communicator) -> None:
        state = switched(comm, Dense()).handle.state_dict()
        for make in SCHEMES.values():
            averager = even_averager(TENSORS, make(), group=comm)
            averager.handle.load_state_dict(state)
            assert averager.handle.stats().training_steps == 2
            assert averager.handle.memory_norm() == 0

    simulate(2, on_rank)


@pytest.mark.parametrize("now", [1, 2, 3])
def test_other_ranks_go_on_with_a_flush(now: int) -> None:
    def saving(comm: Communicator) -> tuple[Named, Named]:
        averager = switched(comm, TopK(0.05), Dense())
        return averager.handle.full_state_dict(), owed_by(averager, comm.rank)

    results = simulate(4, saving).results
    full = results[0][0]

    def loading(comm: Communicator) -> Named:
        averager = even_averager(TENSORS, Dense(), group=comm)
        averager.handle.load_state_dict(full)
        return owed_by(averager, comm.rank)

    loaded = simulate(now, loading).results
    for name in ("first", "second", "third"):
        expected = total([owed for _, owed in results], name) / 4
        assert torch.allclose(total(loaded, name) / now, expected, rtol=1e-6, atol=1e-4)


def test_a_dense_handle_drops_no_memory_in_silence() -> None:
    def on_rank(comm: Communicator) -> None:
        state = switched(comm, TopK(0.05)).handle.state_dict()
        averager = even_averager(TENSORS, Dense(), group=comm)
        # As torch.distributed.checkpoint loads: what the handle of now has keys for.
        common = {key: state[key] for key in averager.handle.state_dict()}
        with pytest.raises(InputError, match="holds nothing of the old ranks"):
            averager.handle.load_state_dict(common)
        velocities = switched(comm, TopK(0.05, momentum=0.5)).handle.state_dict()
        with pytest.raises(InputError, match="its memory is a sum of velocities"):
            averager.handle.load_state_dict(velocities)
        assert averager.handle.memory_norm() == 0

    simulate(2, on_rank)


class Broken(Dense):
    """Fails at the end of its second step for vectors of float64."""

    def begin(self, gradient: Tensor, *rest: Any, **more: Any) -> Any:
        average = super().begin(gradient, *rest, **more)
        if self.steps == 3 and gradient.dtype == torch.float64:
            raise LookupError("a scheme's mistake")
        return average


@pytest.mark.parametrize("scope", SCOPES)
def test_a_step_that_fails_flushes_nothing(scope: Scope) -> None:
    def on_rank(comm: Communicator) -> None:
        averager = switched(comm, TopK(0.05), scope=scope)
        averager.handle.switch(Broken())
        averager.average(gradients_of(comm.rank, 2))
        before, flushed = averager.handle.state_dict(), averager.handle.stats().flushed
        with pytest.raises((LookupError, CommunicationError), match="a scheme's mistake"):
            averager.average(gradients_of(comm.rank, 3))
        after = averager.handle.state_dict()
        assert all(same_bits(before[key], after[key]) for key in before)
        assert averager.handle.stats().flushed == flushed

    simulate(2, on_rank)


def test_a_tensor_without_gradient_is_flushed_when_it_has_one_again() -> None:
    """As under DDP, which throws away the updates of parameters that no rank used."""

    def on_rank(comm: Communicator) -> Named:
        averager = switched(comm, TopK(0.05), withhold_zeros=True, frontload=False)
        averager.handle.switch("dense")
        before = owed_by(averager, comm.rank)["first"]
        for step in range(FLUSH_STEPS + 2):
            gradients = gradients_of(comm.rank, step)
            if comm.rank == 1:
                gradients["first"].zero_()
            averager.average(gradients)
        left = owed_by(averager, comm.rank)
        full = averager.handle.full_state_dict()
        if comm.rank == 0:
            assert torch.equal(full["rank1.first"].double(), before_of[1])
            assert not full["rank0.first"].any()
            assert not full["rank1.third"].any()
            assert not any(part.any() for part in left.values())
        else:
            assert torch.equal(left["first"], before)
            assert not left["third"].any()
        state = averager.handle.state_dict()
        averager.average(gradients_of(comm.rank, 0))
        assert not averager._session.residuals.flush.owed
        assert averager.handle.state_dict()["flush"] == 0
        return state

    def owing(comm: Communicator) -> Tensor:
        return owed_by(switched(comm, TopK(0.05), frontload=False), comm.rank)["first"]

    before_of = simulate(2, owing).results
    first, second = simulate(2, on_rank).results
    for key in first.keys() & second.keys():
        assert torch.equal(first[key], second[key]), "a checkpoint may keep that of any rank"
    assert first["flush"] == 1
    merged = first | second

    def loading(comm: Communicator) -> None:
        dense, sparse = (
            even_averager(TENSORS, Dense(), group=comm),
            even_averager(TENSORS, TopK(), group=comm),
        )
        # What torch.distributed.checkpoint loads: all that the handle of now has keys for.
        with pytest.raises(InputError, match="holds nothing of the old ranks"):
            dense.handle.load_state_dict({key: merged[key] for key in dense.handle.state_dict()})
        sparse.handle.load_state_dict({key: merged[key] for key in sparse.handle.state_dict()})
        dense.handle.load_state_dict(merged)
        for averager in (sparse, dense):
            owed = averager.handle.state_dict()[f"rank{comm.rank}.first"]
            assert torch.equal(owed, merged[f"rank{comm.rank}.first"])

    simulate(2, loading)


def test_which_tensors_are_sparse_follows_the_scheme() -> None:
    def on_rank(comm: Communicator) -> None:
        densities = {"third": 1, "second": 0.5}
        with pytest.warns(UserWarning, match="densities are for schemes that select"):
            averager = even_averager(TENSORS, Dense(), group=comm, densities=densities)
        assert averager.handle.sparse == frozenset()
        averager.average(gradients_of(comm.rank, 0))
        averager.handle.switch("topk", density=0.01)
        assert averager.handle.sparse == {"first", "second"}
        assert "2 made sparse" in repr(averager.handle)
        ones = {name: torch.ones_like(one) for name, one in TENSORS.items()}
        updates = averager.average(ones)
        counts = {name: int(update.count_nonzero()) for name, update in updates.items()}
        assert counts["second"] == 750
        assert (counts["third"], counts["bias"]) == (2200, 40)
        assert averager.handle.scheme.density == 0.01
        averager.handle.switch("dense")
        assert "4 sent whole" in repr(averager.handle)

    simulate(2, on_rank)


def test_velocity_is_carried_over() -> None:
    def on_rank(comm: Communicator) -> None:
        through = switched(comm, TopK(0.05, momentum=0.5))
        state = through.handle.state_dict()
        through.handle.switch(GTopK(0.05, momentum=0.5))
        loaded = even_averager(TENSORS, GTopK(0.05, momentum=0.5), group=comm)
        loaded.handle.load_state_dict(state)
        assert_same_future(loaded, through, comm.rank)

    simulate(2, on_rank)


def test_what_cannot_be_switched_is_refused_and_changes_nothing() -> None:
    def on_rank(comm: Communicator) -> None:
        averager = switched(comm, TopK(0.05))
        state, said = averager.handle.state_dict(), repr(averager.handle)
        for scheme, changes, words in [
            ("tpok", {}, "did you mean 'topk'"),
            ("topk", {"densty": 0.1}, "did you mean 'density'"),
            (TopK(0.1), {"density": 0.2}, "settings go with a scheme's name"),
            (3, {}, "scheme must be a Scheme"),
            ("dgc", {}, r"corrects momentum=0, and .* corrects 0\.9"),
        ]:
            with pytest.raises(InputError, match=words):
                averager.handle.switch(scheme, **changes)
        vector = torch.zeros(1200)
        averager.queue(vector, {"first": (0, 1200)})
        with pytest.raises(InputError, match=r"finish\(\) that step before switch\(\)"):
            averager.handle.switch("dense")
        averager.finish()
        after = averager.handle.state_dict()
        assert repr(averager.handle).startswith(said.split(";")[0])
        assert state.keys() == after.keys()
        averager.handle.close()
        with pytest.raises(CommunicationError, match="the handle was closed"):
            averager.handle.switch("dense")

    simulate(2, on_rank)


def test_nodes_that_are_not_alike_are_told_at_the_switch() -> None:
    def on_rank(comm: Communicator) -> None:
        averager, other = (switched(comm, TopK(0.05)) for _ in range(2))
        with pytest.raises(InputError, match="equally many ranks"):
            averager.handle.switch("torus2d", ranks_per_node=2)
        with pytest.raises(InputError, match="equally many ranks"):
            even_averager(TENSORS, Hierarchical(Dense(), 2), group=comm)
        assert_same_future(averager, other, comm.rank)

    simulate(3, on_rank)


def test_ranks_that_switch_to_different_schemes_are_told() -> None:
    def on_rank(comm: Communicator) -> None:
        averager = switched(comm, TopK(0.05))
        with pytest.raises(MismatchError):
            averager.handle.switch("dense" if comm.rank == 0 else "gtopk")
        assert repr(averager.handle.scheme) == repr(TopK(0.05))
        raise LookupError("all were told")

    with pytest.raises(LookupError):
        simulate(3, on_rank)


def test_half_precision_is_flushed_at_its_own_precision() -> None:
    like = {"weight": torch.zeros(40, 30, dtype=torch.bfloat16)}

    def on_rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        averager = even_averager(like, TopK(0.05), group=comm)
        ones = {"weight": torch.full_like(like["weight"], 1.0)}
        came_out = averager.average(ones)["weight"].double()
        averager.handle.switch("dense")
        for _ in range(FLUSH_STEPS):
            came_out += averager.average(ones)["weight"].double()
        return came_out, owed_by(averager, comm.rank).get("weight", torch.zeros(1))

    for came_out, owed in simulate(2, on_rank).results:
        assert not owed.any()
        assert torch.allclose(came_out, torch.tensor(FLUSH_STEPS + 1.0).double(), rtol=2**-7)


@given(
    gradient=st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=20),
    size=st.floats(2**-14, 1),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_shares_too_small_for_a_gradient_stay_owed(
    gradient: list[float], size: float, dtype: torch.dtype
) -> None:
    """All that is lost is what the last step's update is rounded by."""
    given = torch.tensor(gradient).to(dtype)
    owed = size * torch.linspace(-1, 1, len(given))
    state = {
        "steps": torch.tensor(1),
        "world_size": torch.tensor(1),
        "flush": torch.tensor(FLUSH_STEPS),
        "rank0.weight": owed,
    }

    def on_rank(comm: Communicator) -> Tensor:
        averager = even_averager({"weight": given}, Dense(), group=comm, policy=lambda *_: False)
        averager.handle.load_state_dict(state)
        updates = [averager.average({"weight": given})["weight"] for _ in range(FLUSH_STEPS + 1)]
        assert averager.handle.stats().flushed == pytest.approx(float(owed.abs().sum()), rel=1e-5)
        return torch.stack(updates).double().sub(given.double()).sum(0)

    (gained,) = simulate(1, on_rank).results
    allowed = torch.finfo(dtype).eps * (given.double().abs() + owed.abs()) + 1e-6
    assert ((gained - owed).abs() <= allowed).all()


def test_step_ahead_follows_what_is_still_owed() -> None:
    def on_rank(comm: Communicator) -> None:
        parameters = {name: one.clone() for name, one in TENSORS.items()}
        optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
        averager = even_averager(TENSORS, Dense(), group=comm)
        ahead = averager.ahead(parameters, optimizer)

        seen = []
        for scheme in ("topk", "dense"):
            averager.handle.switch(scheme)
            for step in range(FLUSH_STEPS + 1):
                averager.average(gradients_of(comm.rank, step))
                seen.append(any(bool(one.any()) for one in ahead.moved().values()))
        assert seen[0]
        assert not seen[-1]

    simulate(2, on_rank)


def test_optimisers_that_step_ahead_does_not_know_are_named_when_it_matters() -> None:
    def on_rank(comm: Communicator) -> None:
        parameters = {name: one.clone() for name, one in TENSORS.items()}
        averager = even_averager(TENSORS, Dense(), group=comm)
        averager.ahead(parameters, torch.optim.Adagrad(parameters.values()))
        with pytest.warns(UserWarning, match="Adagrad updates"):
            averager.handle.switch("topk")

    simulate(1, on_rank)


def test_what_is_owed_may_have_a_sum_that_overflows() -> None:
    owed = torch.full((1200,), 1e307, dtype=torch.float64)
    state = {"steps": torch.tensor(1), "world_size": torch.tensor(1), "rank0.weight": owed}

    def on_rank(comm: Communicator) -> Tensor:
        like = {"weight": torch.zeros(40, 30, dtype=torch.float64)}
        averager = even_averager(like, Dense(), group=comm)
        averager.handle.load_state_dict(state)
        return sum(averager.average(like)["weight"] for _ in range(FLUSH_STEPS))

    (came_out,) = simulate(1, on_rank).results
    torch.testing.assert_close(came_out.flatten(), owed)


def test_a_scaled_share_is_flushed_by_the_one_rank_that_owes() -> None:
    owed = torch.arange(1200.0)
    state = {"steps": torch.tensor(1), "world_size": torch.tensor(1), "rank0.weight": owed}

    def on_rank(comm: Communicator) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", 4.0)
        scaler.scale(torch.ones(1))
        like = {"weight": torch.zeros(40, 30)}
        averager = even_averager(like, Dense(), group=comm, scaler=scaler)
        averager.handle.load_state_dict(state)
        return sum(averager.average(like)["weight"] for _ in range(FLUSH_STEPS)) / 4

    for came_out in simulate(2, on_rank).results:
        torch.testing.assert_close(came_out.flatten(), owed)
