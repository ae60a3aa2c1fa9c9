"""Checkpoints of an averager: gathered whole, loaded in part, and resumed bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import (
    Bidirectional,
    Dense,
    GTopK,
    Hierarchical,
    ScaleCom,
    Scheme,
    TopK,
)
from sparcel.core.training import Averager, Scope
from sparcel.core.training.residuals import FLUSH_STEPS
from sparcel.errors import InputError
from tests.evenly import even_averager
from tests.strategies import same_bits
from tests.training.tensors import (
    LIKE,
    SCOPES,
    TENSORS,
    Layout,
    Named,
    gradients_of,
    layouts,
    owed_by,
    queue_step,
    schemes,
)

SELECTIONS: dict[str, Callable[[], Scheme]] = {
    "exact": lambda: TopK(0.05),
    "chunk-wise": lambda: TopK(0.05, selector="chunkwise"),
    "random, with momentum": lambda: TopK(0.05, selector="randomk", momentum=0.5),
    "two levels": lambda: Hierarchical(GTopK(0.1)),
}


@pytest.mark.parametrize("make", SELECTIONS.values(), ids=SELECTIONS)
@settings(max_examples=5)
@given(
    layout=layouts(),
    first=st.permutations(sorted(LIKE)),
    gap=st.integers(0, 2),
    scope=st.sampled_from(SCOPES),
)
def test_a_driver_that_begins_with_one_vector_resumes_bit_by_bit(
    make: Callable[[], Scheme], layout: Layout, first: Sequence[str], gap: int, scope: Scope
) -> None:
    """As DDP does, which rebuilds its buckets, in another order, after a step or two."""

    def on_rank(comm: Communicator) -> None:
        through = even_averager(LIKE, make(), group=comm, scope=scope)
        for step in range(2):
            queue_step(through, layout, gradients_of(comm.rank, step), gap)
        resumed = even_averager(LIKE, make(), group=comm, scope=scope)
        resumed.handle.load_state_dict(through.handle.state_dict())
        for step, begun in zip(range(2, 5), [[first], [first], layout], strict=True):
            gradients = gradients_of(comm.rank, step)
            expected = queue_step(through, layout, gradients, gap)
            updates = queue_step(resumed, begun, gradients, gap if begun is layout else 0)
            assert all(same_bits(updates[name], expected[name]) for name in LIKE)

    simulate(4, on_rank, ranks_per_node=2)


@given(
    before=layouts(),
    after=layouts(),
    scopes=st.tuples(st.sampled_from(SCOPES), st.sampled_from(SCOPES)),
)
def test_what_is_owed_survives_any_change_of_vectors_and_scope(
    before: Layout, after: Layout, scopes: tuple[Scope, Scope]
) -> None:
    def on_rank(comm: Communicator) -> tuple[Named, Named, Named]:
        first = even_averager(LIKE, TopK(0.05), group=comm, scope=scopes[0])
        queue_step(first, before, gradients_of(comm.rank, 0), gap=1)
        second = even_averager(LIKE, TopK(0.05), group=comm, scope=scopes[1])
        second.handle.load_state_dict(first.handle.state_dict())
        updates = queue_step(second, after, gradients_of(comm.rank, 1), gap=0)
        return owed_by(first, comm.rank), updates, owed_by(second, comm.rank)

    results = simulate(2, on_rank).results
    for name in results[0][0]:
        went_in = sum(gradients_of(rank, 1)[name].flatten().double() for rank in range(2))
        owed, kept = (sum(result[place][name] for result in results) for place in (0, 2))
        assert torch.equal(2 * results[0][1][name] + kept, owed + went_in)


def trained(comm: Communicator, scheme: Scheme, steps: int = 2, **settings: Any) -> Averager:
    averager = even_averager(TENSORS, scheme, group=comm, **settings)
    for step in range(steps):
        averager.average(gradients_of(comm.rank, step))
    return averager


@schemes
@pytest.mark.parametrize("steps", [0, 2])
def test_the_full_state_is_that_of_all_ranks(make: Callable[[], Scheme], steps: int) -> None:
    def on_rank(comm: Communicator) -> tuple[Named, Named, int]:
        averager = trained(comm, make(), steps)
        before, counted = comm.traffic.messages_sent, averager.handle.stats().bytes_sent
        full = averager.handle.full_state_dict()
        sent = comm.traffic.messages_sent - before
        assert averager.handle.stats().bytes_sent == counted
        own = averager.handle.state_dict()
        for step in range(3):  # must not change the gathered state
            averager.average(gradients_of(comm.rank, step))
        return full, own, sent

    results = simulate(4, on_rank, ranks_per_node=2).results
    (full, *others), states, messages = zip(*results, strict=True)
    expected = {key: part for state in states for key, part in state.items()}
    assert full.keys() == expected.keys()
    assert all(same_bits(full[key], expected[key]) for key in full)
    assert others == [{}, {}, {}]
    remembered = [key for key in states[0] if key.startswith("rank0.")]
    assert messages == (0, *[len(remembered)] * 3)  # one tensor at a time


def test_a_distributed_checkpoint_of_another_filter_owes_the_same(tmp_path: Path) -> None:
    def on_rank(comm: Communicator) -> None:
        saved = trained(comm, ScaleCom(0.05, beta=0.5))
        state = saved.handle.state_dict()
        of_0_1_0 = {
            key: part / 2 if key.startswith("rank") else part for key, part in state.items()
        } | {"filter": torch.tensor(0.5, dtype=torch.float64)}
        dcp.save(of_0_1_0, checkpoint_id=tmp_path, no_dist=True)
        loaded = trained(comm, ScaleCom(0.05, beta=0.5), 0)
        asked = loaded.handle.state_dict()
        dcp.load(asked, checkpoint_id=tmp_path, no_dist=True)
        loaded.handle.load_state_dict(asked)
        before, after = owed_by(saved, 0), owed_by(loaded, 0)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)

    simulate(1, on_rank)


def test_a_state_is_refused_while_tensors_are_queued() -> None:
    def on_rank(comm: Communicator) -> None:
        averager = even_averager({"a": torch.zeros(8)}, TopK(0.5), group=comm)
        state = averager.handle.state_dict()
        averager.queue(torch.ones(8), {"a": (0, 8)})
        with pytest.raises(InputError, match=r"finish\(\) that step before load_state_dict"):
            averager.handle.load_state_dict(state)
        averager.finish()
        averager.handle.load_state_dict(state)

    simulate(1, on_rank)


@pytest.mark.parametrize("nodes", [None, 1])
def test_a_state_of_another_filter_owes_the_same(nodes: int | None) -> None:
    def on_rank(comm: Communicator) -> None:
        def placed(scheme: Scheme) -> Scheme:
            return scheme if nodes is None else Hierarchical(scheme, nodes)

        saved = trained(comm, placed(ScaleCom(0.05, beta=0.5)))
        before, state = owed_by(saved, comm.rank), saved.handle.state_dict()
        of_0_1_0 = {  # which saved memory times the filter
            key: part / 2 if key.startswith("rank") else part for key, part in state.items()
        }
        for held in (state, of_0_1_0 | {"filter": torch.tensor(0.5)}):
            loaded = trained(comm, placed(ScaleCom(0.05, beta=0.5, beta_steps=2)), 0)
            loaded.handle.load_state_dict(held)
            after = owed_by(loaded, comm.rank)
            assert before.keys() == after.keys()
            assert all(torch.equal(after[name], before[name]) for name in before)

    simulate(2, on_rank)


def mean_of(states: Sequence[Named], kind: str, name: str) -> Tensor:
    """Return the average over ranks of what they remember of a tensor, given all their states."""
    parts = [state[f"{kind}{rank}.{name}"].double() for rank, state in enumerate(states)]
    return torch.stack(parts).mean(0)


PAYING: dict[str, Callable[[], Scheme]] = {
    "topk": lambda: TopK(1.0),
    "bidirectional": lambda: Bidirectional(1.0, format="raw"),
    "two levels": lambda: Hierarchical(TopK(1.0), ranks_per_node=1),
    "flushed": Dense,
}
"""Schemes that pay what is owed soon."""


@given(
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    momentum=st.sampled_from([0.0, 0.5]),
    paying=st.sampled_from(list(PAYING)),
)
def test_any_number_of_ranks_pays_what_any_other_owed(
    before: int, after: int, momentum: float, paying: str
) -> None:
    """Updates are averages, so the average of the memory, and of velocities, is what stays."""

    def save(comm: Communicator) -> tuple[Named, Named]:
        handle = trained(comm, TopK(0.05, momentum=momentum)).handle
        return handle.state_dict(), handle.full_state_dict()

    states, full = zip(*simulate(before, save).results, strict=True)

    def load(comm: Communicator) -> Named:
        averager = even_averager(TENSORS, TopK(0.05, momentum=momentum), group=comm)
        averager.handle.load_state_dict(full[0])
        assert averager.handle.stats().training_steps == 2
        return averager.handle.state_dict()

    loaded = simulate(after, load).results
    large = owed_names(full[0])
    for name in large:
        assert any(state[f"rank{rank}.{name}"].any() for rank, state in enumerate(states))
        for kind in ("rank", "velocity") if momentum else ("rank",):
            found, expected = mean_of(loaded, kind, name), mean_of(states, kind, name)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-4)
    if momentum:
        return

    def pay(comm: Communicator) -> Named:
        averager = even_averager(TENSORS, PAYING[paying](), group=comm)
        averager.handle.load_state_dict(full[0])
        paid = {name: torch.zeros(like.numel()).double() for name, like in TENSORS.items()}
        nothing = {name: torch.zeros_like(like) for name, like in TENSORS.items()}
        for _ in range(FLUSH_STEPS if paying == "flushed" else 1):
            for name, update in averager.average(nothing).items():
                paid[name] += update.double().flatten()
        return paid

    for paid in simulate(after, pay).results:
        for name in large:
            expected = mean_of(states, "rank", name)
            torch.testing.assert_close(paid[name], expected, rtol=1e-5, atol=1e-4)


def owed_names(state: Named) -> list[str]:
    return [key.removeprefix("rank0.") for key in state if key.startswith("rank0.")]


def state_without(what: str, state: Named) -> Named:
    """Return part of the state of two ranks."""
    if what == "everything":
        return {}
    if what == "the other ranks":
        return {key: part for key, part in state.items() if not key.startswith("rank1.")}
    if what == "the memory beside a velocity":
        return {
            key.replace("rank", "velocity", key.endswith(".first")): state[key] for key in state
        }
    if what == "a tensor":
        return {key: part for key, part in state.items() if not key.endswith(".first")}
    return {**state, "rank0.fourth": torch.zeros(3), "rank1.fourth": torch.zeros(3)}


@pytest.mark.parametrize(
    ("what", "said", "empty"),
    [
        ("everything", "the state has no 'steps'", 2 * ["first", "second", "third"]),
        ("the other ranks", r"nothing of the old ranks \[1\].*save full_state_dict\(\)", None),
        ("a tensor", r"holds no memory of \['first'\]", ["first"]),
        ("the memory beside a velocity", r"holds no memory of \['first'\]", ["first"]),
        ("nothing", "fourth' fits no tensor", []),
    ],
)
def test_a_state_in_part_is_refused_unless_asked_for(
    what: str, said: str, empty: list[str] | None
) -> None:
    def saved(comm: Communicator) -> Named:
        training = trained(comm, TopK(0.05), frontload=False)  # all memory has some
        return training.handle.full_state_dict()

    full = simulate(2, saved).results[0]
    part = state_without(what, full)

    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(0.05), group=comm)
        if what == "the other ranks" and comm.rank == 0:
            averager.handle.load_state_dict(part)
            return
        with pytest.raises(InputError, match=said):
            averager.handle.load_state_dict(part)
        with pytest.warns(UserWarning, match=f"starts empty on rank {comm.rank}.*{said}"):
            averager.handle.load_state_dict(part, strict=False)
        assert averager.handle.stats().training_steps == (0 if what == "everything" else 2)
        started_empty = ["first", "second", "third"] if empty is None else empty
        for name, owed in owed_by(averager, comm.rank).items():
            assert bool(owed.any()) != (name in started_empty)
            if owed.any():
                assert torch.equal(owed, full[f"rank{comm.rank}.{name}"].double())

    simulate(2, on_rank)


@pytest.mark.parametrize("start", [-1, 0, 100_000])
def test_a_layout_that_the_tensors_do_not_fit_in_is_ignored(start: int) -> None:
    """As after a change of the model, where ``strict=False`` loads what still fits."""

    def on_rank(comm: Communicator) -> None:
        first = trained(comm, TopK(0.05))
        state = first.handle.state_dict()
        state["layout.third"][1] = start  # the first tensor of its vector starts at 0
        second = even_averager(TENSORS, TopK(0.05), group=comm)
        second.handle.load_state_dict(state)
        gradients = gradients_of(comm.rank, 2)
        expected, updates = first.average(gradients), second.average(gradients)
        assert all(same_bits(updates[name], expected[name]) for name in TENSORS)

    simulate(2, on_rank)


def test_a_layout_with_a_tensor_without_elements_is_used() -> None:
    """Version 0.1.0 wrote where such a tensor lay; steps leave it out."""
    like = {**LIKE, "none": torch.zeros(0, 4)}
    layout = [["first", "bias"], ["second", "third"]]

    def on_rank(comm: Communicator) -> None:
        first, second = (
            even_averager(like, TopK(0.05), group=comm, policy=lambda *_: False) for _ in range(2)
        )
        queue_step(first, layout, gradients_of(comm.rank, 0), 0)
        state = first.handle.state_dict()
        state["layout.none"] = state["layout.first"]
        second.handle.load_state_dict(state)
        gradients = gradients_of(comm.rank, 1)
        expected = queue_step(first, layout, gradients, 0)
        updates = queue_step(second, [sorted(LIKE)], gradients, 0)
        assert all(same_bits(updates[name], expected[name]) for name in LIKE)

    simulate(2, on_rank)


def test_a_whole_state_is_loaded_without_a_warning() -> None:
    def on_rank(comm: Communicator) -> None:
        averager = trained(comm, TopK(0.05))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            averager.handle.load_state_dict(averager.handle.state_dict(), strict=False)

    simulate(2, on_rank)


def test_a_checkpoint_of_another_format_loads() -> None:
    """The memory is what it is, however it came about."""

    def on_rank(comm: Communicator) -> None:
        rounding = even_averager(LIKE, TopK(0.05, format="packed:4"), group=comm)
        queue_step(rounding, [list(LIKE)], gradients_of(comm.rank, 0), 0)
        plain = even_averager(LIKE, TopK(0.05), group=comm)
        plain.handle.load_state_dict(rounding.handle.state_dict())
        queue_step(plain, [list(LIKE)], gradients_of(comm.rank, 1), 0)
        for averager in (rounding, plain):
            assert any(bool(owed.any()) for owed in owed_by(averager, comm.rank).values())

    simulate(2, on_rank)
