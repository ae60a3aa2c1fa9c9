"""The averager turns named tensors into updates, on the simulated cluster, without DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sparcel
from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Scheme, TopK
from sparcel.core.training import Scope
from sparcel.errors import CommunicationError, InputError
from tests.evenly import even_averager
from tests.strategies import same_bits
from tests.training.tensors import (
    SCOPES,
    TENSORS,
    WORDS,
    Named,
    gradients_of,
    owed_by,
    rows_of,
    schemes,
)


def train(comm: Communicator, scheme: Scheme, steps: int, **settings: Any) -> tuple[Any, Named]:
    """Return the updates of some steps, and the memory owed at the end."""
    averager = even_averager(TENSORS, scheme, group=comm, **settings)
    updates = [averager.average(gradients_of(comm.rank, step)) for step in range(steps)]
    return updates, owed_by(averager, comm.rank)


@schemes
@pytest.mark.parametrize("world", [1, 4])
def test_ranks_agree_and_nothing_is_lost(make: Callable[[], Scheme], world: int) -> None:
    results = simulate(world, lambda comm: train(comm, make(), 3), ranks_per_node=1).results
    updates = results[0][0]
    for other, _ in results:
        for mine, first in zip(other, updates, strict=True):
            assert all(same_bits(mine[name], first[name]) for name in TENSORS)
    for name, like in TENSORS.items():
        assert all((u[name].shape, u[name].dtype) == (like.shape, like.dtype) for u in updates)
        went_in = sum(
            gradients_of(rank, s)[name].double() for rank in range(world) for s in range(3)
        )
        came_out = world * sum(update[name].double() for update in updates)
        kept = sum(
            owed.get(name, torch.zeros(like.numel())).view(like.shape) for _, owed in results
        )
        assert torch.equal(came_out + kept, went_in)


def test_small_tensors_are_averaged_in_full_and_large_ones_are_not() -> None:
    def on_rank(comm: Communicator) -> tuple[Named, frozenset[str]]:
        averager = even_averager(TENSORS, TopK(0.01), group=comm)
        return averager.average(gradients_of(comm.rank, 0)), averager.handle.sparse

    for updates, sparse in simulate(4, on_rank).results:
        assert sparse == {"first", "second", "third"}
        whole = sum(gradients_of(rank, 0)["bias"] for rank in range(4)) / 4
        assert torch.equal(updates["bias"], whole)
        size = sum(TENSORS[name].numel() for name in sparse)
        nonzero = sum(int(updates[name].count_nonzero()) for name in sparse)
        assert 0 < nonzero < 0.05 * size


def test_densities_go_by_pattern() -> None:
    def on_rank(comm: Communicator) -> Named:
        densities = {"sec*": 0.5, "third": 1}
        settings: dict[str, Any] = {"densities": densities, "frontload": False}
        averager = even_averager(TENSORS, TopK(0.01), group=comm, **settings)
        assert averager.handle.sparse == {"first", "second"}
        return averager.average({name: torch.ones_like(p) for name, p in TENSORS.items()})

    (updates,) = simulate(1, on_rank).results
    counts = {name: int(update.count_nonzero()) for name, update in updates.items()}
    assert counts == {"first": 35, "bias": 40, "second": 750, "third": 2200}


def test_gradients_stay_as_they_were_and_their_order_does_not_matter() -> None:
    def on_rank(comm: Communicator) -> None:
        plain, turned = (even_averager(TENSORS, TopK(0.05), group=comm) for _ in range(2))
        for step in range(2):
            gradients = gradients_of(comm.rank, step)
            shuffled = dict(sorted(gradients.items(), reverse=comm.rank % 2 == 0))
            updates = turned.average(shuffled)
            assert list(updates) == list(shuffled)
            expected = plain.average(gradients)
            assert all(same_bits(updates[name], expected[name]) for name in TENSORS)
            untouched = gradients_of(comm.rank, step)
            assert all(same_bits(gradients[name], untouched[name]) for name in TENSORS)

    simulate(3, on_rank)


@given(
    order=st.permutations(["first", "bias", "third"]),
    cut=st.integers(1, 2),
    scope=st.sampled_from(SCOPES),
)
def test_tensors_may_be_queued_in_other_vectors_in_every_step(
    order: list[str], cut: int, scope: Scope
) -> None:
    layouts = [[order], [order[:cut], order[cut:]], [[name] for name in order]]

    def on_rank(comm: Communicator) -> tuple[Named, Named]:
        tensors = {name: TENSORS[name] for name in order}
        averager = even_averager(tensors, TopK(0.05), group=comm, scope=scope)
        came_out = {name: torch.zeros(TENSORS[name].numel()) for name in order}
        for step, layout in enumerate(layouts):
            gradients = gradients_of(comm.rank, step)
            updates = {}
            for names in layout:
                vector = torch.cat([gradients[name].flatten() for name in names])
                stops = accumulate((gradients[name].numel() for name in names), initial=0)
                places = dict(zip(names, pairwise(stops), strict=True))
                averager.queue(vector, places)
                updates |= {name: vector[start:stop] for name, (start, stop) in places.items()}
            assert averager.finish() == {}
            for name, update in updates.items():
                came_out[name] += update
        return came_out, owed_by(averager, comm.rank)

    results = simulate(2, on_rank).results
    for name in order:
        went_in = sum(gradients_of(rank, step)[name] for rank in range(2) for step in range(3))
        kept = sum(owed.get(name, torch.zeros(1)) for _, owed in results)
        assert torch.equal(2 * results[0][0][name] + kept, went_in.flatten().double())


def test_sparse_gradients_are_averaged_as_rows() -> None:
    def on_rank(comm: Communicator) -> tuple[Tensor, frozenset[str]]:
        averager = even_averager(WORDS, TopK(0.05), group=comm, rows=["words"])
        gradients = gradients_of(comm.rank, 0) | {"words": rows_of(comm.rank, 0)}
        updates = averager.average(gradients)
        assert updates["words"].is_sparse
        return updates["words"].to_dense(), averager.handle.sparse

    for update, sparse in simulate(3, on_rank).results:
        assert torch.equal(update * 3, sum(rows_of(rank, 0).to_dense() for rank in range(3)))
        assert "words" not in sparse


def test_sparse_gradients_cause_no_warnings_of_torch() -> None:
    def on_rank(comm: Communicator) -> None:
        averager = even_averager(WORDS, TopK(0.05), group=comm, rows=["words"])
        averager.average(gradients_of(comm.rank, 0) | {"words": rows_of(comm.rank, 0)})

    torch.set_warn_always(True)  # torch gives some warnings only once in a process
    try:
        with warnings.catch_warnings(action="error"):
            simulate(2, on_rank)
    finally:
        torch.set_warn_always(False)


class Broken(TopK):
    """Fails at the end of its third step for vectors of float64."""

    def begin(self, gradient: Tensor, *rest: Any, **more: Any) -> Any:
        average = super().begin(gradient, *rest, **more)
        if self.steps == 2 and gradient.dtype == torch.float64:
            raise LookupError("a scheme's mistake")
        return average


@pytest.mark.parametrize("scope", SCOPES)
def test_a_step_that_fails_keeps_all_memory_as_it_was(scope: Scope) -> None:
    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, Broken(0.05), group=comm, scope=scope)
        for step in range(2):
            averager.average(gradients_of(comm.rank, step))
        before = averager.handle.state_dict()
        with pytest.raises((LookupError, CommunicationError), match="a scheme's mistake"):
            averager.average(gradients_of(comm.rank, 2))
        after = averager.handle.state_dict()
        assert all(same_bits(before[key], after[key]) for key in before)

    simulate(2, on_rank)


@schemes
def test_training_continues_from_a_state_as_if_not_interrupted(make: Callable[[], Scheme]) -> None:
    def on_rank(comm: Communicator) -> None:
        first = even_averager(TENSORS, make(), group=comm)
        for step in range(2):
            first.average(gradients_of(comm.rank, step))
        second = even_averager(TENSORS, make(), group=comm)
        second.handle.load_state_dict(first.handle.state_dict())
        for step in range(2, 4):
            expected = first.average(gradients_of(comm.rank, step))
            updates = second.average(gradients_of(comm.rank, step))
            assert all(same_bits(updates[name], expected[name]) for name in TENSORS)

    simulate(4, on_rank, ranks_per_node=2)


def test_zeros_are_withheld_if_asked_for() -> None:
    """A rank that did not use a tensor keeps its memory of it."""

    def on_rank(comm: Communicator) -> bool:
        averager = even_averager(TENSORS, TopK(0.05), group=comm, withhold_zeros=True)
        averager.average(gradients_of(comm.rank, 0))
        before = owed_by(averager, comm.rank)["first"]
        gradients = gradients_of(comm.rank, 1)
        if comm.rank == 1:
            gradients["first"].zero_()
        averager.average(gradients)
        return torch.equal(owed_by(averager, comm.rank)["first"], before)

    assert simulate(2, on_rank).results == [False, True]


def test_training_knows_no_wrapper() -> None:
    folder = Path(sparcel.training.__file__).parent
    texts = {path.name: path.read_text() for path in folder.glob("*.py")}
    assert texts
    assert not [name for name, text in texts.items() if "nn.parallel" in text or "Bucket" in text]


def test_a_queued_vector_holds_its_updates_before_the_step_ends() -> None:
    def on_rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        averager = even_averager(
            {"weight": torch.zeros(64)},
            TopK(0.25),
            group=comm,
            policy=lambda *_: False,
            frontload=False,
        )
        vector = torch.arange(64.0) * (1 + comm.rank)
        averager.queue(vector, {"weight": (0, 64)}).wait()
        early = vector.clone()
        averager.finish()
        return early, vector

    for early, late in simulate(3, on_rank).results:
        assert early.count_nonzero() == 16
        assert torch.equal(early, late)


def test_what_a_step_has_already_is_refused() -> None:
    def on_rank(comm: Communicator) -> list[str]:
        said = []
        averager = even_averager({"a": torch.zeros(8), "b": torch.zeros(8)}, TopK(0.5), group=comm)
        averager.queue(torch.ones(8), {"a": (0, 8)})
        for call in (
            lambda: averager.queue(torch.ones(8), {"a": (0, 8)}),
            lambda: averager.queue(torch.ones(12), {"a": (0, 8), "b": (4, 12)}),
            lambda: averager.average({"a": torch.ones(8), "b": torch.ones(8)}),
        ):
            with pytest.raises(InputError) as caught:
                call()
            said.append(str(caught.value))
        averager.queue(torch.ones(8), {"b": (0, 8)})
        averager.finish()
        return said

    for twice, overlapping, opened in simulate(2, on_rank).results:
        assert "['a'] are queued already in this step" in twice
        assert "must not overlap" in overlapping
        assert "finish() that step before average()" in opened


def test_tensors_without_floats_are_refused() -> None:
    with pytest.raises(InputError, match=r"must hold floats.*'steps' has torch\.int64"):
        simulate(
            1, lambda comm: even_averager({"steps": torch.zeros(8).long()}, TopK(), group=comm)
        )


EMPTY = {"none": torch.zeros(0), "no rows": torch.zeros(0, 50, dtype=torch.float64)}
ONE = {"one": torch.zeros(()), "large": torch.zeros(40, 30, dtype=torch.float64)}
ROWS = {"no words": torch.zeros(0, 4), "no width": torch.zeros(60, 0)}


@schemes
@pytest.mark.parametrize(
    ("tensors", "scope"),
    [(EMPTY, "model"), (EMPTY | ONE, "bucket"), (EMPTY | ROWS, "model")],
    ids=["empty", "one", "rows"],
)
def test_tensors_without_elements_or_dimensions_are_averaged(
    make: Callable[[], Scheme], scope: Scope, tensors: Named
) -> None:
    def on_rank(comm: Communicator) -> None:
        settings: dict[str, Any] = {"group": comm, "scope": scope, "rows": ROWS.keys() & tensors}
        settings["policy"] = lambda name, _: name == "one"
        averager = even_averager(tensors, make(), **settings)
        gradients = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
        gradients |= {name: gradients[name].to_sparse(1) for name in settings["rows"]}
        for scheme in (None, "dense", "topk"):
            if scheme is not None:
                averager.handle.switch(scheme)
            updates = averager.average(gradients)
            assert {n: u.shape for n, u in updates.items()} == {
                n: t.shape for n, t in tensors.items()
            }
            assert f"steps: {averager.handle.stats().steps}" in repr(averager.handle)
            again = even_averager(tensors, averager.handle.scheme, **settings)
            again.handle.load_state_dict(averager.handle.state_dict())
            again.average(gradients)
        assert averager.handle.stats().void_steps == 0

    simulate(3, on_rank, ranks_per_node=1)
