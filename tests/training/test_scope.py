"""With scope="model" one selection is made over all tensors of a step, however they are queued."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Auto, Dense, Request, ScaleCom, Scheme, TopK
from sparcel.core.training import Averager, Scope
from sparcel.errors import MismatchError
from tests.evenly import even_averager
from tests.sampling import meeting
from tests.strategies import same_bits
from tests.training.tensors import (
    LIKE,
    SCHEMES,
    SCOPES,
    TENSORS,
    WORDS,
    Layout,
    Named,
    gradients_of,
    layouts,
    owed_by,
    packed,
    queue_step,
    rows_of,
    schemes,
)

LARGE = ("first", "second", "third")


def whole(comm: Communicator, scheme: Scheme, **settings: Any) -> Averager:
    return even_averager(LIKE, scheme, group=comm, scope="model", **settings)


def counts(averager: Averager) -> dict[str, Any]:
    """Return the statistics without those of time."""
    stats = averager.handle.stats().as_dict()
    return {name: value for name, value in stats.items() if "seconds" not in name}


@schemes
@settings(max_examples=8)
@given(
    names=st.permutations(sorted(LIKE)),
    gap=st.integers(0, 2),
    unused=st.sampled_from(LARGE),
    own=st.booleans(),
)
def test_with_one_vector_both_scopes_are_the_same(
    make: Callable[[], Scheme], names: Sequence[str], gap: int, unused: str, own: bool
) -> None:
    def on_rank(comm: Communicator) -> None:
        scheme = make()
        last = next(name for name in reversed(names) if name != "bias")
        densities = {last: 0.2} if own and scheme.remembers else None
        one = whole(comm, scheme, withhold_zeros=True, densities=densities)
        by_bucket = even_averager(
            LIKE, scheme, group=comm, withhold_zeros=True, densities=densities
        )
        for step in range(3):
            gradients = gradients_of(comm.rank, step)
            if (comm.rank, step) == (1, 1):
                gradients[unused] = torch.zeros_like(gradients[unused])
            updates = queue_step(one, [names], gradients, gap)
            expected = queue_step(by_bucket, [names], gradients, gap)
            assert all(same_bits(updates[name], expected[name]) for name in LIKE)
        mine, theirs = owed_by(one, comm.rank), owed_by(by_bucket, comm.rank)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert counts(one) == counts(by_bucket)

    simulate(2, on_rank, ranks_per_node=1)


@schemes
@settings(max_examples=8)
@given(layout=layouts(), gap=st.integers(0, 2))
def test_a_step_equals_the_scheme_s_step_on_all_vectors_end_to_end(
    make: Callable[[], Scheme], layout: Layout, gap: int
) -> None:
    layout = [names for names in layout if names != ["bias"]]
    names = [name for part in layout for name in part]

    def on_rank(comm: Communicator) -> None:
        averager, scheme = whole(comm, make()), make()
        for step in range(3):
            gradients = gradients_of(comm.rank, step)
            updates = queue_step(averager, layout, gradients, gap)
            vector, places = packed(names, gradients, gap)
            small = [places[name] for name in places if name == "bias" and scheme.remembers]
            request = Request(apart=small)
            expected = scheme.step(vector, comm, request=request)
            for name in LARGE:
                start, stop = places[name]
                assert same_bits(updates[name], expected[start:stop]), name
            if "bias" in names:
                total = sum(gradients_of(rank, step)["bias"] for rank in range(2))
                assert torch.equal(updates["bias"], total / 2)

    simulate(2, on_rank, ranks_per_node=1)


@settings(max_examples=15)
@given(layout=layouts())
def test_layers_with_large_gradients_get_more(layout: Layout) -> None:
    layout = [[name for name in names if name != "bias"] for names in layout]

    def on_rank(comm: Communicator) -> dict[str, int]:
        averager = whole(comm, TopK(0.01), densities={"second": 0.1}, frontload=False)
        gradients = {name: torch.ones(like.shape) for name, like in LIKE.items()}
        gradients["third"] *= 2
        updates = queue_step(averager, [names for names in layout if names], gradients, gap=0)
        return {name: int(update.count_nonzero()) for name, update in updates.items()}

    # "second" has a k of its own wherever it lies; that of the others is 1 % of 1200 + 2200.
    assert simulate(2, on_rank).results == [{"first": 0, "second": 150, "third": 34}] * 2


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_several_dtypes_are_one_vector_and_nothing_is_lost(half: torch.dtype) -> None:
    like = {**TENSORS, "third": TENSORS["third"].to(half)}

    def on_rank(comm: Communicator) -> tuple[list[Named], Named]:
        averager = even_averager(like, ScaleCom(0.05), group=comm, scope="model")
        updates = []
        for step in range(3):
            gradients = gradients_of(comm.rank, step)
            gradients["third"] = gradients["third"].to(half)
            updates.append(averager.average(gradients))
            assert all(updates[-1][name].dtype == like[name].dtype for name in like)
            resumed = even_averager(like, ScaleCom(0.05), group=comm, scope="model")
            resumed.handle.load_state_dict(averager.handle.state_dict())
            averager = resumed  # every step is one after a checkpoint
        state = averager.handle.state_dict()
        assert {state[f"rank{comm.rank}.{name}"].dtype for name in LARGE} == {torch.float64}
        return updates, owed_by(averager, comm.rank)

    results = simulate(2, on_rank).results
    for name in LARGE:
        went_in = sum(gradients_of(rank, s)[name].double() for rank in range(2) for s in range(3))
        came_out = 2 * sum(update[name].double() for update in results[0][0])
        kept = sum(owed[name].view(like[name].shape) for _, owed in results)
        assert torch.equal(came_out + kept, went_in)


def test_a_state_of_other_vectors_gives_its_memory_and_not_its_layout() -> None:
    def on_rank(comm: Communicator) -> None:
        by_bucket = even_averager(LIKE, TopK(0.05), group=comm)
        queue_step(by_bucket, [["third"], ["second", "bias", "first"]], gradients_of(0, 0), gap=1)
        state = by_bucket.handle.state_dict()
        bare = {key: part for key, part in state.items() if not key.startswith("layout.")}
        updates = []
        for loaded in (state, bare):
            averager = whole(comm, TopK(0.05))
            averager.handle.load_state_dict(loaded, strict=False)
            layout = [["first", "second"], ["third", "bias"]]
            updates.append(queue_step(averager, layout, gradients_of(comm.rank, 1), gap=0))
        assert all(same_bits(updates[0][name], updates[1][name]) for name in LIKE)

    simulate(2, on_rank)


def step_of_two_kinds(averager: Averager, gradients: Named) -> Named:
    """Queue vectors of two dtypes and rows; wait for each, which must not need the others."""
    updates = {}
    for name, gradient in gradients.items():
        if gradient.is_sparse:
            averager.queue_rows(name, gradient)
        else:
            updates[name] = gradient.flatten().clone()
            averager.queue(updates[name], {name: (0, gradient.numel())}).wait()
            assert torch.equal(updates[name].nan_to_num(), gradient.flatten().nan_to_num())
    return {**updates, **averager.finish()}


@pytest.mark.parametrize(("scheme", "name"), meeting(["topk", "auto"], WORDS, each=1))
def test_a_void_step_leaves_no_trace(scheme: str, name: str) -> None:
    make = SCHEMES[scheme]

    def gradients(rank: int, step: int) -> Named:
        return gradients_of(rank, step) | {"words": rows_of(rank, step).coalesce()}

    def on_rank(comm: Communicator) -> None:
        settings: dict[str, Any] = {"group": comm, "rows": ["words"], "scope": "model"}
        spoilt, fine = (even_averager(WORDS, make(), **settings) for _ in range(2))
        for averager in (spoilt, fine):
            step_of_two_kinds(averager, gradients(comm.rank, 0))
        void = gradients(comm.rank, 7)
        if comm.rank == 1:
            poisoned = void[name].values() if void[name].is_sparse else void[name]
            poisoned[1, ...] = math.nan
        for update in step_of_two_kinds(spoilt, void).values():
            values = update.coalesce().values() if update.is_sparse else update
            assert values.numel() and values.isnan().all()
        mine, theirs = spoilt.handle.state_dict(), fine.handle.state_dict()
        assert all(same_bits(mine[key], theirs[key]) for key in theirs)
        updates, expected = (
            step_of_two_kinds(one, gradients(comm.rank, 1)) for one in (spoilt, fine)
        )
        assert all(torch.equal(updates[key].to_dense(), expected[key].to_dense()) for key in WORDS)

    simulate(2, on_rank)


def test_an_update_that_overflows_its_narrower_dtype_makes_the_step_void() -> None:
    like = {"half": torch.zeros(4, dtype=torch.float16), "single": torch.zeros(4)}

    def on_rank(comm: Communicator) -> tuple[bool, bool, int]:
        settings: dict[str, Any] = {"policy": lambda *_: False, "frontload": False}
        averager = even_averager(like, TopK(0.125), group=comm, scope="model", **settings)
        half = torch.tensor([60000.0, 0, 0, 0], dtype=torch.float16)
        first = averager.average({"half": half, "single": torch.tensor([1e6, 0, 0, 0])})
        second = averager.average({"half": half, "single": torch.zeros(4)})  # 60000 twice
        finite = first["single"].isfinite().all() and not first["half"].any()
        void = all(update.isnan().all() for update in second.values())
        return bool(finite), void, averager.handle.stats().training_steps

    assert simulate(2, on_rank).results == [(True, True, 1)] * 2


@pytest.mark.parametrize("used", [["single"], ["single", "half"], ["double"]])
def test_memory_has_one_dtype_whichever_tensors_a_step_has(used: list[str]) -> None:
    like = {"half": torch.zeros(40, 30, dtype=torch.float16), "single": torch.zeros(40, 30)}
    like["double"] = torch.zeros(0 if "single" in used else 1200, 1, dtype=torch.float64)

    def on_rank(comm: Communicator) -> Named:
        settings: dict[str, Any] = {"policy": lambda *_: False, "scope": "model"}
        averager = even_averager(like, TopK(0.125), group=comm, **settings)
        for name in used:
            averager.queue(torch.ones_like(like[name]).flatten(), {name: (0, 1200)})
        averager.finish()
        averager.handle.full_state_dict()
        return averager.handle.state_dict()

    for rank, state in enumerate(simulate(2, on_rank).results):
        assert {state[f"rank{rank}.{name}"].dtype for name in like} == {torch.float64}


def test_without_memory_a_vector_travels_in_its_own_dtype() -> None:
    like = {"single": torch.zeros(1200), "double": torch.zeros(1200, dtype=torch.float64)}

    def on_rank(comm: Communicator, scope: Scope) -> int:
        settings: dict[str, Any] = {"policy": lambda *_: False, "scope": scope}
        averager = even_averager(like, Dense(), group=comm, **settings)
        averager.queue(torch.ones(1200), {"single": (0, 1200)})
        averager.finish()
        return averager.handle.stats().bytes_sent

    by_scope = [simulate(2, partial(on_rank, scope=scope)).results for scope in SCOPES]
    assert by_scope[0] == by_scope[1]


@pytest.mark.parametrize("layout", [[["bias", *LARGE]], [["bias", "first"], ["second"], ["third"]]])
def test_a_step_is_one_exchange_and_one_of_small_tensors(layout: Layout) -> None:
    def messages(comm: Communicator) -> int:
        averager = whole(comm, TopK(0.05))
        for step in range(3):
            queue_step(averager, layout, gradients_of(comm.rank, step), gap=0)
        return averager.handle.stats().messages_sent

    assert simulate(2, messages).results == [6, 6]


def test_a_dense_choice_sends_small_tensors_along() -> None:
    def on_rank(comm: Communicator) -> tuple[set[str], int]:
        averager = whole(comm, Auto(0.05, candidates=["dense"]))
        updates = queue_step(
            averager, [["first", "bias"], ["third", "second"]], gradients_of(comm.rank, 0), gap=1
        )
        for name, update in updates.items():
            total = sum(gradients_of(rank, 0)[name] for rank in range(2))
            assert torch.equal(update, total.flatten().float() / 2)
        return set(averager.handle.chosen.values()), averager.handle.stats().coordinates

    sizes = sum(like.numel() + 1 for like in LIKE.values())
    assert simulate(2, on_rank).results == [({"dense"}, sizes)] * 2


def test_ranks_with_different_scopes_are_told() -> None:
    def on_rank(comm: Communicator) -> None:
        even_averager(LIKE, TopK(), group=comm, scope="model" if comm.rank else "bucket")

    with pytest.raises(MismatchError, match=r"scope '(bucket|model)'.*the same .*scope"):
        simulate(2, on_rank)


def test_what_is_attached_tells_its_scope() -> None:
    (shown,) = simulate(1, lambda comm: repr(whole(comm, TopK()).handle)).results
    assert "over the whole model on 1 ranks" in shown
